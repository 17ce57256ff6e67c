// Photo -> the model's input, with exactly the pixels that Pillow gives: its filters, its order of passes, its rounding.
// The canvas's own resize gives other pixels, and with them other answers.

const PRECISION = 22;                       // bits behind the point of Pillow's coefficients for 8-bit pixels
const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));

// name -> [support, filter]
export const FILTERS = {
  bilinear: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  bicubic: [2, (x) => {
    const a = -0.5;
    x = Math.abs(x);
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
  }],
  lanczos: [3, (x) => (Math.abs(x) < 3 ? sinc(x) * sinc(x / 3) : 0)],
};

// For the outputs first .. first + count - 1 of an axis: where each begins to read, and its coefficients as integers.
function coefficients(size, out, first, count, filter) {
  const [reach, weigh] = FILTERS[filter], scale = size / out, stretch = Math.max(scale, 1), support = reach * stretch;
  return Array.from({ length: count }, (_, i) => {
    const centre = (first + i + 0.5) * scale;
    const start = Math.max(0, Math.trunc(centre - support + 0.5)), end = Math.min(size, Math.trunc(centre + support + 0.5));
    const weights = Array.from({ length: end - start }, (_, x) => weigh((x + start - centre + 0.5) / stretch));
    const sum = weights.reduce((total, w) => total + w, 0);
    return [start, Int32Array.from(weights, (w) => {
      const scaled = w / (sum || 1) * 2 ** PRECISION;
      return Math.trunc(scaled + (scaled < 0 ? -0.5 : 0.5));
    })];
  });
}

// One pass along an axis: `lines` lines of pixels, each resized from the source to the target. `step` is the distance
// between two pixels of a line and `line` the distance between two lines; both in bytes.
function pass(source, target, lines, depth, found, from, to) {
  for (let y = 0; y < lines; y += 1) {
    for (let x = 0; x < found.length; x += 1) {
      const [start, weights] = found[x], count = weights.length;
      for (let c = 0; c < depth; c += 1) {
        let sum = 1 << (PRECISION - 1), at = y * from.line + start * from.step + c;
        for (let k = 0; k < count; k += 1, at += from.step) sum += source[at] * weights[k];
        sum >>= PRECISION;
        target[y * to.line + x * to.step + c] = sum < 0 ? 0 : sum > 255 ? 255 : sum;
      }
    }
  }
}

// The two passes, each of which keeps only its side of the box.
function columns({ data, width, height, depth }, outWidth, filter, box) {
  if (width === outWidth && box.width === width) return { data, width, height, depth };
  const found = coefficients(width, outWidth, box.left, box.width, filter), row = box.width * depth;
  const target = new Uint8Array(row * height);
  pass(data, target, height, depth, found, { step: depth, line: width * depth }, { step: depth, line: row });
  return { data: target, width: box.width, height, depth };
}

function rows({ data, width, height, depth }, outHeight, filter, box) {
  if (height === outHeight && box.height === height) return { data, width, height, depth };
  const found = coefficients(height, outHeight, box.top, box.height, filter), row = width * depth;
  const target = new Uint8Array(row * box.height);
  pass(data, target, width, depth, found, { step: row, line: depth }, { step: row, line: depth });
  return { data: target, width, height: box.height, depth };
}

// Resize an image and keep only a box of the result, as {left, top, width, height}. Pillow rounds to 8 bits between the
// passes, so their order decides some pixels. Since version 13, Pillow begins with the height where that saves work.
export function resize(image, outWidth, outHeight, filter, box) {
  if (filter === "nearest") return nearest(image, outWidth, outHeight, box);
  if (image.height - outHeight > 2 * Math.max(0, image.width - outWidth)) {
    return columns(rows(image, outHeight, filter, box), outWidth, filter, box);
  }
  return rows(columns(image, outWidth, filter, box), outHeight, filter, box);
}

// Pillow adds up steps instead of multiplying, which decides where a boundary is hit exactly.
function nearest({ data, width, height, depth }, outWidth, outHeight, box) {
  const places = (size, out) => {
    let at = size / out * 0.5;
    return Array.from({ length: out }, () => {
      const place = Math.floor(at);
      at += size / out;
      return place;
    });
  };
  const rows = places(height, outHeight), columns = places(width, outWidth), found = new Uint8Array(box.width * box.height * depth);
  for (let y = 0; y < box.height; y += 1) {
    for (let x = 0; x < box.width; x += 1) {
      const at = (rows[y + box.top] * width + columns[x + box.left]) * depth;
      for (let c = 0; c < depth; c += 1) found[(y * box.width + x) * depth + c] = data[at + c];
    }
  }
  return { data: found, width: box.width, height: box.height, depth };
}

// Python's round: halves go to the even neighbour.
export function round(x) {
  const low = Math.floor(x), rest = x - low;
  return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
}

// [width, height] after the resize and before the crop.
export function resized(width, height, spec) {
  let [H, W] = spec.size;
  if (spec.resize === "squash") return [W, H];
  [H, W] = [Math.floor(H / spec.crop), Math.floor(W / spec.crop)];
  if (H === W) return width <= height ? [H, Math.trunc(H * height / width)] : [Math.trunc(H * width / height), H];
  const ratio = Math.min(height / H, width / W);
  return [round(width / ratio), round(height / ratio)];
}

// RGBA pixels of a photo -> the pixels that the model sees, [H][W][channels] in 8 bits.
export function pixels({ data, width, height }, spec) {
  const depth = spec.mean.length, image = { data: new Uint8Array(width * height * depth), width, height, depth };
  for (let i = 0; i < width * height; i += 1) {
    const r = data[4 * i], g = data[4 * i + 1], b = data[4 * i + 2];
    if (depth === 1) {
      image.data[i] = (19595 * r + 38470 * g + 7471 * b + 32768) >> 16;           // Pillow's luma
    } else {
      image.data[3 * i] = r;
      image.data[3 * i + 1] = g;
      image.data[3 * i + 2] = b;
    }
  }
  const [H, W] = spec.size, [outWidth, outHeight] = resized(width, height, spec);
  const box = { left: round((outWidth - W) / 2), top: round((outHeight - H) / 2), width: W, height: H };
  return resize(image, outWidth, outHeight, spec.interpolation, box);
}

// 8-bit pixels -> normalised planes [C, H, W], in the order of operations that the model was trained with.
export function normalise({ data, width, height, depth }, spec) {
  const planes = new Float32Array(depth * width * height);
  const mean = Float32Array.from(spec.mean), std = Float32Array.from(spec.std);
  for (let c = 0; c < depth; c += 1) {
    for (let i = 0; i < width * height; i += 1) {
      const share = Math.fround(data[i * depth + c] / 255);
      planes[c * width * height + i] = Math.fround(share - mean[c]) / std[c];
    }
  }
  return planes;
}
