// A photo from a file, the clipboard, a drop or the camera -> RGBA pixels, as the file stores them.

const MOST = 16e6;               // pixels that every browser's canvas can hold

export async function decode(blob) {
  const how = { colorSpaceConversion: "none", premultiplyAlpha: "none", imageOrientation: "from-image" };
  let image;
  try {
    image = await createImageBitmap(blob, how);
  } catch {
    throw new Error("This file is not an image that your browser can open. Try a JPEG or a PNG.");
  }
  const pixels = image.width * image.height;
  if (pixels > MOST) {
    const resizeWidth = Math.floor(image.width * Math.sqrt(MOST / pixels));
    image = await createImageBitmap(image, { ...how, resizeWidth, resizeQuality: "high" });
  }
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.width, image.height];
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  pen.drawImage(image, 0, 0);
  return pen.getImageData(0, 0, image.width, image.height);
}

const $ = (id) => document.getElementById(id);

export function setUpPhotos(take) {
  const first = (files) => [...files].find((file) => file.type.startsWith("image/")) ?? files[0];
  const input = $("file");
  $("choose").addEventListener("click", () => input.click());
  for (const one of [input, $("capture")]) {
    one.addEventListener("change", () => {
      if (one.files.length) take(one.files[0]);
      one.value = "";
    });
  }
  addEventListener("paste", (event) => {
    if (event.clipboardData?.files.length) take(first(event.clipboardData.files));
  });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer?.files.length) take(first(event.dataTransfer.files));
  });
  setUpCamera(take);
}

function setUpCamera(take) {
  const dialog = $("camera"), video = $("video"), message = $("camera-message");
  let stream = null;
  $("take").addEventListener("click", async () => {
    if (!navigator.mediaDevices?.getUserMedia) {               // no access to it: the phone's camera app
      $("capture").click();
      return;
    }
    message.textContent = "";
    $("shoot").disabled = true;
    dialog.showModal();
    try {
      stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: { ideal: 1280 } } });
      video.srcObject = stream;
      await video.play();
      $("shoot").disabled = false;
      $("shoot").focus();
    } catch {
      message.textContent = "No camera was found, or this page may not use it. Choose a photo instead.";
    }
  });
  $("shoot").addEventListener("click", () => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
    canvas.getContext("2d").drawImage(video, 0, 0);
    canvas.toBlob((blob) => {
      dialog.close();
      if (blob) take(blob);
    }, "image/png");
  });
  $("no-photo").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    stream?.getTracks().forEach((track) => track.stop());
    stream = null;
    video.srcObject = null;
  });
}
