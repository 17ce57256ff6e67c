// Take a photo with the browser's camera, or with the phone's camera app where the browser has no access to one. The
// explorable page has a copy of this file, so it imports nothing.

const $ = (id) => document.getElementById(id);

// Set up the dialog, and return the function that opens it; `take` gets the photo, a file of the given type.
export function setUpCamera(take, type = "image/jpeg") {
  const dialog = $("camera"), video = $("video"), message = $("camera-message");
  let stream = null;

  const stop = () => {
    stream?.getTracks().forEach((track) => track.stop());
    stream = null;
    video.srcObject = null;
  };

  const open = async () => {
    if (!navigator.mediaDevices?.getUserMedia) {
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
  };
  $("shoot").addEventListener("click", () => {
    const canvas = document.createElement("canvas");
    canvas.width = video.videoWidth;
    canvas.height = video.videoHeight;
    canvas.getContext("2d").drawImage(video, 0, 0);
    canvas.toBlob((blob) => {
      dialog.close();
      if (blob) take(new File([blob], `photo.${type === "image/png" ? "png" : "jpg"}`, { type }));
    }, type, 0.92);
  });
  $("no-photo").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", stop);
  $("capture").addEventListener("change", (event) => {
    if (event.target.files.length) take(event.target.files[0]);
    event.target.value = "";
  });
  return open;
}
