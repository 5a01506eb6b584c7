// Runs the network on the drawing, or on a dropped file.
const pad = document.getElementById("pad"), seen = document.getElementById("seen");
const pen = pad.getContext("2d", {willReadFrequently: true}), view = seen.getContext("2d", {willReadFrequently: true});
const [channels, height, width] = about.shape, COUNT = channels * height * width;
const BOX = 20 / 28; // the longer side of a digit in MNIST, as a part of the image's
let given = null; // the pixels of a dropped file that need no scaling
let waiting = false;

function clear() {
  given = null;
  pen.fillStyle = "black";
  pen.fillRect(0, 0, pad.width, pad.height);
  update();
}

function update() {
  waiting = false;
  const pixels = given || drawing();
  put(view, pixels);
  const found = predict(pixels);
  showBars(found.outputs, found.best);
  showLayer(found.layer);
}

function updateSoon() {
  if (!waiting) requestAnimationFrame(update);
  waiting = true;
}

// The pixels of a field as the network gets them: grey, or all of red, then all of green and of blue.
function pixelsOf(context, columns, rows) {
  if (channels == 1) return grey(context, columns, rows);
  const {data} = context.getImageData(0, 0, columns, rows), size = columns * rows;
  return Uint8Array.from({length: channels * size}, (_, i) => data[4 * (i % size) + Math.floor(i / size)]);
}

// Draws such pixels, of the network's size.
function put(context, pixels) {
  const image = context.createImageData(width, height), size = height * width;
  for (let i = 0; i < size; i++)
    image.data.set([...[0, 1, 2].map(k => pixels[(channels == 1 ? 0 : k) * size + i]), 255], 4 * i);
  context.putImageData(image, 0, 0);
}

function grey(context, columns, rows) {
  const {data} = context.getImageData(0, 0, columns, rows), pixels = new Uint8Array(columns * rows);
  for (let i = 0; i < pixels.length; i++)
    pixels[i] = (data[4 * i] * 299 + data[4 * i + 1] * 587 + data[4 * i + 2] * 114) / 1000;
  return pixels;
}

// The drawing as the network's input: scaled, or for digits of MNIST cut out, scaled and placed by its centre of mass.
function drawing() {
  if (!about.centred) {
    const small = field(width, height);
    small.context.drawImage(pad, 0, 0, width, height);
    return pixelsOf(small.context, width, height);
  }
  const ink = grey(pen, pad.width, pad.height);
  let top = pad.height, left = pad.width, bottom = -1, right = -1;
  ink.forEach((value, i) => {
    if (value < 64) return;
    const row = Math.floor(i / pad.width), column = i % pad.width;
    [top, bottom] = [Math.min(top, row), Math.max(bottom, row)];
    [left, right] = [Math.min(left, column), Math.max(right, column)];
  });
  const image = new Uint8Array(height * width);
  if (bottom < 0) return image;
  const wide = right - left + 1, high = bottom - top + 1;
  const scale = Math.min(BOX * height / high, BOX * width / wide);
  const columns = Math.max(1, Math.round(wide * scale)), rows = Math.max(1, Math.round(high * scale));
  const digit = averaged(ink, left, top, wide, high, columns, rows);
  let total = 0, x = 0, y = 0;
  digit.forEach((value, i) => {
    total += value;
    x += value * (i % columns);
    y += value * Math.floor(i / columns);
  });
  const place = (length, mass, extent) =>
    Math.min(Math.max(Math.round(length / 2 - 0.5 - mass / Math.max(total, 1)), 0), length - extent);
  const down = place(height, y, rows), across = place(width, x, columns);
  digit.forEach((value, i) => (image[(down + Math.floor(i / columns)) * width + across + i % columns] = value));
  return image;
}

// A part of the drawing, scaled down: each pixel is the mean of those that it covers.
function averaged(ink, left, top, wide, high, columns, rows) {
  const image = new Uint8Array(rows * columns);
  for (let i = 0; i < image.length; i++) {
    const row = Math.floor(i / columns), column = i % columns;
    const y0 = Math.floor(row * high / rows), y1 = Math.max(y0 + 1, Math.floor((row + 1) * high / rows));
    const x0 = Math.floor(column * wide / columns), x1 = Math.max(x0 + 1, Math.floor((column + 1) * wide / columns));
    let sum = 0;
    for (let y = y0; y < y1; y++) for (let x = x0; x < x1; x++) sum += ink[(top + y) * pad.width + left + x];
    image[i] = sum / ((y1 - y0) * (x1 - x0));
  }
  return image;
}

// A file: an image, or numbers of which the first may be a label.
async function open(file) {
  try {
    const isImage = file.type.startsWith("image/");
    const pixels = isImage ? await pixelsOfImage(file) : pixelsOfText(await file.text());
    if (pixels) {
      const small = field(width, height);
      put(small.context, pixels);
      pen.imageSmoothingEnabled = false;
      pen.drawImage(small.canvas, 0, 0, pad.width, pad.height);
    }
    given = pixels;
    status.textContent = file.name;
    update();
  } catch (error) {
    status.textContent = `${file.name}: ${error.message}`;
  }
}

// The pixels of an image of the network's size; others are put on the pad, and the result is null.
async function pixelsOfImage(file) {
  const bitmap = await createImageBitmap(file).catch(() => { throw new Error("is not an image that the browser can read"); });
  const {canvas, context} = field(bitmap.width, bitmap.height);
  context.drawImage(bitmap, 0, 0);
  if (bitmap.width == width && bitmap.height == height) return pixelsOf(context, width, height);
  const pixels = grey(context, bitmap.width, bitmap.height);
  const scale = Math.min(pad.width / bitmap.width, pad.height / bitmap.height);
  const [w, h] = [bitmap.width * scale, bitmap.height * scale];
  const light = channels == 1 && pixels[0] + pixels[pixels.length - 1] > 255 && about.dark;
  pen.fillStyle = "black";
  pen.fillRect(0, 0, pad.width, pad.height);
  pen.imageSmoothingEnabled = true;
  pen.filter = light ? "invert(1)" : "none";
  pen.drawImage(canvas, (pad.width - w) / 2, (pad.height - h) / 2, w, h);
  pen.filter = "none";
  return null;
}

function pixelsOfText(text) {
  const numbers = text.trim().split(/[\s,;]+/).map(Number), count = COUNT;
  const values = numbers.length == count + 1 ? numbers.slice(1) : numbers;
  if (values.length != count || !values.every(x => x >= 0 && x <= 255))
    throw new Error(`found ${numbers.length} numbers, expected ${count} from 0 to 255, or one more before them`);
  return Uint8Array.from(values);
}

const colour = document.getElementById("colour"); // only for colour images
let last = null;
function point(event) {
  const box = pad.getBoundingClientRect();
  return [(event.clientX - box.left) * pad.width / box.width, (event.clientY - box.top) * pad.height / box.height];
}

function line(to) {
  pen.strokeStyle = colour ? colour.value : "white";
  pen.lineWidth = 18;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(...last);
  pen.lineTo(to[0] + 0.01, to[1]); // a line without length would not be drawn
  pen.stroke();
  last = to;
  given = null;
  updateSoon();
}

pad.addEventListener("pointerdown", event => {
  pad.setPointerCapture(event.pointerId);
  last = point(event);
  line(last);
});
pad.addEventListener("pointermove", event => {
  if (last) for (const part of event.getCoalescedEvents?.() ?? [event]) line(point(part));
});
for (const name of ["pointerup", "pointercancel"]) pad.addEventListener(name, () => (last = null));
document.getElementById("clear").addEventListener("click", clear);
document.getElementById("file").addEventListener("change", event => {
  if (event.target.files.length) open(event.target.files[0]);
});
document.addEventListener("dragover", event => event.preventDefault());
document.addEventListener("drop", event => {
  event.preventDefault();
  if (event.dataTransfer.files.length) open(event.dataTransfer.files[0]);
});
const begin = clear;
