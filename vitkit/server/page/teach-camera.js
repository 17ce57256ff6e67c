// Two uses of the camera: bursts of photos of a class, and watching what the classifier says.

import { $ } from "./dom.js";

const PACE = 220, LOOK = 350, MOST = 60;      // milliseconds between photos and between looks; photos of one burst
const WIDE = 1280;

export const canUseCamera = () => Boolean(navigator.mediaDevices?.getUserMedia);      // not over plain http

const open = () => navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: { ideal: WIDE } } });

function frame(video, name, width = Infinity) {
  const canvas = document.createElement("canvas"), scale = Math.min(1, width / video.videoWidth);
  canvas.width = Math.round(video.videoWidth * scale);
  canvas.height = Math.round(video.videoHeight * scale);
  canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => {
    canvas.toBlob((blob) => resolve(new File([blob], name, { type: "image/jpeg" })), "image/jpeg", 0.92);
  });
}

class Stream {
  async play(video) {
    this.stream = await open();
    video.srcObject = this.stream;
    await video.play();
  }

  end(video) {
    this.stream?.getTracks().forEach((track) => track.stop());
    this.stream = null;
    video.srcObject = null;
  }
}

// The dialog: photos are taken while the button is held, by pointer or by the space bar; a click takes one.
export class Burst extends Stream {
  constructor(give) {
    super();
    this.give = give;
    this.of = null;
    const button = $("teach-shoot"), begin = () => this.begin(), stop = () => this.stop();
    button.addEventListener("pointerdown", begin);
    for (const kind of ["pointerup", "pointercancel", "pointerleave", "blur"]) button.addEventListener(kind, stop);
    button.addEventListener("contextmenu", (event) => event.preventDefault());
    button.addEventListener("keydown", (event) => { if ([" ", "Enter"].includes(event.key) && !event.repeat) begin(); });
    button.addEventListener("keyup", stop);
    button.addEventListener("click", (event) => { if (event.detail === 0 && !this.shots) begin().then(stop); });      // assistive technology
    $("teach-camera-close").addEventListener("click", () => $("teach-camera").close());
    $("teach-camera").addEventListener("close", () => { this.stop(); this.end($("teach-video")); });
  }

  async open(of, name) {
    this.of = of;
    $("teach-camera-title").textContent = `Photos of ${name}`;
    $("teach-camera-words").textContent = "";
    $("teach-shoot").disabled = true;
    $("teach-camera").showModal();
    try {
      await this.play($("teach-video"));
      $("teach-camera-words").textContent = "Turn it and move around: photos that differ teach more.";
      $("teach-shoot").disabled = false;
      $("teach-shoot").focus();
    } catch {
      $("teach-camera-words").textContent = "No camera was found, or this page may not use it. Add photos from files instead.";
    }
  }

  async begin() {
    if (this.timer || !this.stream) return;
    this.shots = 0;
    this.taken = [];
    this.number = Date.now();
    const shoot = () => {
      if (this.shots >= MOST) { this.stop(); return; }
      this.shots += 1;
      this.taken.push(frame($("teach-video"), `camera-${this.number}-${this.shots}.jpg`));
      $("teach-camera-words").textContent = `${this.shots} photo${this.shots === 1 ? "" : "s"}`;
    };
    this.timer = setInterval(shoot, PACE);
    shoot();
  }

  async stop() {
    if (!this.timer) return;
    clearInterval(this.timer);
    this.timer = null;
    const taken = this.taken;
    this.give(await Promise.all(taken), this.of, taken.length > 1 ? this.number : 0);
    setTimeout(() => { this.shots = 0; }, 50);
  }
}

// The camera in "Try it": look(file) is called a few times per second.
export class Watch extends Stream {
  constructor(look) {
    super();
    this.look = look;
    this.on = false;
  }

  async start() {
    const video = $("teach-live");
    this.on = true;
    $("teach-watch").textContent = "Stop watching";
    try {
      await this.play(video);
    } catch {
      this.stop();
      $("teach-status").textContent = "No camera was found, or this page may not use it. Choose a photo instead.";
      return;
    }
    video.hidden = false;
    this.timer = setInterval(async () => { if (this.on && !document.hidden) this.look(await frame(video, "live.jpg", 480)); }, LOOK);
  }

  stop() {
    if (!this.on) return;
    this.on = false;
    clearInterval(this.timer);
    this.end($("teach-live"));
    $("teach-live").hidden = true;
    $("teach-watch").textContent = "Watch live";
  }
}
