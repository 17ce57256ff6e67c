// The photo as patches, on a canvas: colours laid over it, patches moved apart or erased, and which patch is pointed at.

import { css, heat, signed } from "./colours.js";

const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Stage {
  // `on` has point(patch or null), pick(patch), paint(patch, erase) and done() after a stroke.
  constructor(canvas, { rows, columns, size }, on) {
    Object.assign(this, { canvas, rows, columns, size, on });
    this.now = { values: new Float32Array(rows * columns), gap: 0, heat: 0 };
    this.scene = { values: this.now.values, gap: 0, style: "photo", erased: new Set(), held: null, cursor: null };
    this.listen();
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  set image(image) {
    this.bitmap = image;
    this.draw();
  }

  listen() {
    const { canvas } = this;
    let stroke = null;                          // while patches are painted: whether they are erased or restored
    canvas.addEventListener("pointerdown", (event) => {
      if (this.scene.tool !== "erase") return;
      const patch = this.patchAt(event);
      stroke = !this.scene.erased.has(patch);
      canvas.setPointerCapture(event.pointerId);
      this.on.paint(patch, stroke);
    });
    canvas.addEventListener("pointermove", (event) => {
      const patch = this.patchAt(event);
      if (stroke !== null) this.on.paint(patch, stroke);
      if (stroke !== null || event.pointerType !== "touch") this.on.point(patch);
    });
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, () => {
        if (stroke !== null) this.on.done();
        stroke = null;
      });
    }
    canvas.addEventListener("pointerleave", () => this.on.point(null));
    canvas.addEventListener("click", (event) => { if (this.scene.tool !== "erase") this.on.pick(this.patchAt(event)); });
  }

  patchAt(event) {
    const box = this.canvas.getBoundingClientRect(), within = (v, most) => Math.min(most - 1, Math.max(0, Math.floor(v)));
    const row = within((event.clientY - box.top) / box.height * this.rows, this.rows);
    return row * this.columns + within((event.clientX - box.left) / box.width * this.columns, this.columns);
  }

  // Move to a new scene; what can move, moves.
  show(scene) {
    this.scene = { ...this.scene, ...scene };
    this.canvas.dataset.tool = this.scene.tool;
    const from = { ...this.now, values: this.now.values.slice() }, start = performance.now(), time = calm.matches ? 0 : 220;
    const to = { gap: this.scene.gap, heat: this.scene.style === "heat" ? 1 : 0, values: this.scene.values };
    if (this.scene.style === "photo") to.values = from.values;
    cancelAnimationFrame(this.frame);
    const step = (time_) => {
      const t = time ? Math.min(1, Math.max(0, (time_ - start) / time)) : 1, f = 1 - (1 - t) ** 3;
      this.now.gap = from.gap + f * (to.gap - from.gap);
      this.now.heat = from.heat + f * (to.heat - from.heat);
      this.now.values = to.values.map((v, i) => from.values[i] + f * (v - from.values[i]));
      this.draw();
      if (t < 1) this.frame = requestAnimationFrame(step);
    };
    step(start);
  }

  draw() {
    const { canvas, bitmap, rows, columns, scene, now } = this, width = canvas.parentElement.clientWidth;
    if (!bitmap || width < 10) return;
    const height = Math.round(width * this.size[0] / this.size[1]), ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.imageSmoothingEnabled = bitmap.width >= 96;            // tiny images show their pixels
    const gap = now.gap * 0.3 * width / columns, heated = now.heat > 0.01, apart = gap > 0.01;
    const w = bitmap.width / columns, t = bitmap.height / rows;
    // Edges of a patch on whole device pixels, so that neighbours meet without a seam.
    const whole = (v) => Math.round(v * ratio) / ratio;
    const edge = (i, count, length) => (i * (length + gap)) / count;
    const box = (i) => {
      const column = i % columns, row = Math.floor(i / columns), x = whole(edge(column, columns, width)), y = whole(edge(row, rows, height));
      return [x, y, whole(edge(column + 1, columns, width) - gap) - x, whole(edge(row + 1, rows, height) - gap) - y];
    };
    if (!apart && scene.style !== "signed") {
      pen.filter = heated ? `grayscale(${0.7 * now.heat})` : "none";
      pen.drawImage(bitmap, 0, 0, width, height);
      pen.filter = "none";
    }
    if (heated) {
      pen.globalAlpha = now.heat * 0.74;
      pen.fillStyle = "#06061a";
      pen.fillRect(0, 0, width, height);
    }
    for (let i = 0; i < rows * columns; i += 1) {
      const place = box(i), v = now.values[i];
      if (scene.style === "signed") {
        pen.globalAlpha = 1;
        pen.fillStyle = css(signed(v));
        pen.fillRect(...place);
      } else if (apart || heated) {
        pen.globalAlpha = heated ? Math.max(0, v) ** 0.75 * now.heat + (1 - now.heat) : 1;
        pen.drawImage(bitmap, i % columns * w, Math.floor(i / columns) * t, w, t, ...place);
      }
      if (heated) {
        pen.globalAlpha = 0.55 * Math.max(0, v) * now.heat;
        pen.fillStyle = css(heat(0.35 + 0.6 * v));
        pen.fillRect(...place);
      }
      if (scene.erased.has(i)) this.erase(pen, ...place);
    }
    pen.globalAlpha = 1;
    const frame = (patch, style, thick) => {
      for (const [colour, width_] of [["#000b", thick + 2], [style, thick]]) {
        pen.strokeStyle = colour;
        pen.lineWidth = width_;
        pen.strokeRect(...box(patch));
      }
    };
    if (scene.held !== null) frame(scene.held, "#5df2ff", 3);
    if (scene.cursor !== null && scene.cursor !== scene.held) frame(scene.cursor, "#fff", 1.5);
  }

  erase(pen, x, y, wide, tall) {
    pen.globalAlpha = 1;
    if (this.scene.how === "grey") {
      pen.fillStyle = css(this.scene.grey);
      pen.fillRect(x, y, wide, tall);
      return;
    }
    pen.fillStyle = "#12131c";
    pen.fillRect(x, y, wide, tall);
    pen.strokeStyle = "#ffffff2e";
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x + wide * 0.25, y + tall * 0.75);
    pen.lineTo(x + wide * 0.75, y + tall * 0.25);
    pen.stroke();
  }
}
