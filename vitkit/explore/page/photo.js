// A photo from a file, the clipboard, a drop or the camera -> RGBA pixels, as the file stores them.

import { setUpCamera } from "./camera.js";

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
  input.addEventListener("change", () => {
    if (input.files.length) take(input.files[0]);
    input.value = "";
  });
  addEventListener("paste", (event) => {
    if (event.clipboardData?.files.length) take(first(event.clipboardData.files));
  });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer?.files.length) take(first(event.dataTransfer.files));
  });
  $("take").addEventListener("click", setUpCamera(take, "image/png"));      // PNG: the pixels as they are
}
