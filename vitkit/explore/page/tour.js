// The guided tour: each step sets what is looked at and says what to see. {name} is replaced by a number of this model.

// `middle` is the patch in the middle, `lively` the number of the projection that differs most between patches, and
// `salient` are the patches that get the most attention in the last layers.
export const TOUR = [
  {
    title: "How does a Vision Transformer see?",
    words: "It was built for text, and it reads a photo like a sentence. Let us follow one photo through a real model, which runs here, in your browser.",
    set: () => ({ view: "photo", erased: [], held: null }),
  },
  {
    title: "The words are patches",
    words: "The photo is cut into {patches} patches of {patch} × {patch} pixels. They are the words of the sentence.",
    set: () => ({ view: "patches", erased: [], held: null }),
  },
  {
    title: "Each patch becomes {width} numbers",
    words: "One matrix turns the pixels of a patch into a vector. Here is one of its numbers for every patch: some react to brightness, some to edges, some to colour.",
    set: ({ lively }) => ({ view: "projection", dimension: lively, erased: [], held: null }),
  },
  {
    title: "Positions are learned",
    words: "To the model, the patches are an unordered heap, so each gets a vector that says where it was. Point at patches: similar positions light up. Nobody told the model about rows and columns.",
    set: ({ middle }) => ({ view: "positions", held: middle, erased: [] }),
  },
  {
    title: "Then patches look at each other",
    words: "In each of {layers} layers, every patch decides whom to listen to. Follow the framed patch: in early layers it looks around itself, later at what it belongs to. Move the sliders, or click another patch.",
    set: ({ middle, layers }) => ({ view: "attention", layer: Math.ceil(0.4 * layers) - 1, head: -1, held: middle, erased: [] }),
  },
  {
    title: "Later, they look for meaning",
    words: "This is where the token that gives the answer looks, near the end: mostly at the subject. Move the layer slider to see how it got there, or point at a patch to see where that one looks.",
    set: ({ layers }) => ({ view: "attention", layer: Math.ceil(0.75 * layers) - 1, head: -1, held: null, erased: [] }),
  },
  {
    title: "Every layer adds a little",
    words: "A layer never replaces a vector, it adds to it. This is the residual stream. The brightest patches have the longest vectors: often plain background, which the model seems to use as scratch paper.",
    set: ({ layers }) => ({ view: "stream", layer: layers - 1, held: null, erased: [] }),
  },
  {
    title: "When does it know?",
    words: "Ask the head after each layer what it would answer. For a long time it is nonsense; then, within a layer or two, the answer is there.",
    set: ({ layers }) => ({ view: "layers", layer: layers - 1, held: null, erased: [] }),
  },
  {
    title: "Take away what it looks at",
    words: "These patches got the most attention. Without them, see how the answer changes. Paint to erase more, or paint over an erased patch to bring it back.",
    set: ({ salient }) => ({ view: "erase", how: "mask", held: null, erased: salient }),
  },
  {
    title: "Now you",
    words: "Choose your own photo, or use the camera. It never leaves your device: the model runs in your browser.",
    set: () => ({ view: "attention", head: -1, held: null, erased: [] }),
  },
];

export const fill = (text, model) => text.replace(/\{(\w+)\}/g, (_, name) => model[name]);
