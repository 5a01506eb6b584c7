// Continues a text: each character, byte or token is drawn by its probability after those before.
const prompt = document.getElementById("prompt"), written = document.getElementById("written");
const go = document.getElementById("go"), temperature = document.getElementById("temperature");
const count = document.getElementById("count"), LENGTH = about.shape[2], WIDTH = labels.length;
const SHOWN = {" ": "space", "\n": "new line", "\t": "tab"};
const SPLIT = /'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu; // the pieces of GPT-2
const bytesIn = text => new TextEncoder().encode(text);
let numbers = null, merges = null, running = false;

function begin() {
  if (about.unit == "token") {
    numbers = new Map(about.tokens.map((bytes, i) => [bytes, i]));
    merges = new Map(about.merges.map(([a, b, merged], rank) => [`${a} ${b}`, {merged, rank}]));
  } else {
    numbers = new Map(labels.map((name, i) => [name, i]));
  }
  update();
}

// The tokens of a piece: the pair that was merged first in the training of the tokenizer is merged first.
function tokensOf(piece) {
  const found = Array.from(bytesIn(piece), byte => numbers.get(String.fromCharCode(byte)));
  for (;;) {
    let best = null, place = 0;
    for (let i = 0; i + 1 < found.length; i++) {
      const pair = merges.get(`${found[i]} ${found[i + 1]}`);
      if (pair && (!best || pair.rank < best.rank)) [best, place] = [pair, i];
    }
    if (!best) return found;
    found.splice(place, 2, best.merged);
  }
}

// The classes of a text; an empty one begins a line, or a text.
function classesOf(text) {
  if (about.unit == "byte") return Array.from(bytesIn(text || "\n"));
  if (about.unit == "token") {
    if (!text && about.end !== null) return [about.end];
    return ((text || "\n").match(SPLIT) ?? []).flatMap(tokensOf);
  }
  if (!text) return [numbers.get("\n") ?? 0];
  const unknown = Array.from(text).find(c => !numbers.has(c));
  if (unknown !== undefined) throw new Error(`found "${unknown}", which the training's text does not have`);
  return Array.from(text, c => numbers.get(c));
}

// The probabilities of what follows. Of a long text the last LENGTH classes count.
function following(classes) {
  const last = classes.slice(-LENGTH), input = new Array(LENGTH).fill(0);
  last.forEach((x, i) => (input[i] = x));
  const {outputs} = predict(input), begin = (last.length - 1) * WIDTH;
  const found = outputs.slice(begin, begin + about.classes), total = found.reduce((a, b) => a + b);
  return found.map(p => p / total); // a network may have more outputs than the text has classes
}

function drawn(probabilities) {
  const heat = Math.max(Number(temperature.value), 1e-3), logs = probabilities.map(p => Math.log(p) / heat);
  const most = Math.max(...logs), weights = logs.map(x => Math.exp(x - most));
  let aim = Math.random() * weights.reduce((a, b) => a + b);
  const found = weights.findIndex(w => (aim -= w) < 0);
  return found < 0 ? weights.indexOf(1) : found; // rounding may leave a rest; the largest weight is 1
}

const decoder = new TextDecoder();
function textOf(classes) {
  if (about.unit == "character") return classes.map(i => labels[i]).join("");
  const bytes = classes.flatMap(i => about.unit == "byte" ? [i] : Array.from(about.tokens[i], c => c.charCodeAt(0)));
  return decoder.decode(Uint8Array.from(bytes));
}

function titleOf(i) {
  const text = textOf([i]);
  return SHOWN[text] ?? (text.trim() == text && text ? text : `"${text}"`);
}

function show(classes) {
  const probabilities = following(classes), most = Math.max(...probabilities);
  const order = probabilities.map((_, i) => i).sort((a, b) => probabilities[b] - probabilities[a]).slice(0, BARS);
  showBars(order.map(i => probabilities[i]), 0, order.map(titleOf));
  return probabilities;
}

function update() {
  try {
    show(classesOf(prompt.value));
    status.textContent = "";
  } catch (error) {
    status.textContent = error.message;
  }
}

// Write `count` classes after the prompt; a second click ends that.
async function write() {
  if (running) return void (running = false);
  update();
  if (status.textContent) return;
  const classes = classesOf(prompt.value), before = prompt.value ? classes.length : 1;
  running = true;
  go.textContent = "Stop";
  for (let i = 0; i < Number(count.value) && running; i++) {
    const next = drawn(show(classes));
    if (next === about.end) break;
    classes.push(next);
    written.replaceChildren(Object.assign(document.createElement("b"), {textContent: prompt.value}), textOf(classes.slice(before)));
    await new Promise(done => setTimeout(done));
  }
  running = false;
  go.textContent = "Write";
}

prompt.addEventListener("input", update);
go.addEventListener("click", write);
