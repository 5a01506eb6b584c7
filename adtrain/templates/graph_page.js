const views = [...document.querySelectorAll(".view")];
const slider = document.getElementById("pass");
const details = document.getElementById("details");
const MIN_ZOOM = 0.1, MAX_ZOOM = 3, READABLE = 0.75;
let open = null;
let zoom = 1;

function close() {
  if (open) open.setAttribute("aria-expanded", "false");
  open = null;
  details.hidden = true;
}

function kernel(number) {
  const template = document.querySelector(`template[data-kernel="${number}"]`);
  if (!template) return null;
  const found = document.createElement("details"), text = document.createElement("pre");
  found.appendChild(document.createElement("summary")).textContent = template.dataset.title;
  text.className = "kernel";
  text.textContent = template.content.textContent;
  found.appendChild(text);
  return found;
}

function toggle(box) {
  const same = box === open;
  close();
  if (same) return;
  const template = document.querySelector(`template[data-of="${box.id}"]`), body = details.querySelector(".body");
  details.querySelector("h2").textContent = template.dataset.title;
  body.replaceChildren(template.content.cloneNode(true));
  const kernels = (template.dataset.kernels || "").split(" ").map(kernel).filter(Boolean);
  if (kernels.length) {
    body.appendChild(document.createElement("h3")).textContent = "Kernels after the last pass";
    body.append(...kernels);
  }
  details.hidden = false;
  body.scrollTop = 0;
  box.setAttribute("aria-expanded", "true");
  open = box;
}

function show(index) {
  close();
  views.forEach((view, i) => { view.hidden = i !== index; });
  const {name, note} = views[index].dataset;
  document.querySelector("output").textContent = `after ${name}: ${note}`;
}

const places = () => views.map(view => view.querySelector(".scroll"));
const whole = place => Math.min(1, place.clientWidth / parseFloat(place.style.getPropertyValue("--width")));

// Changes the size of the pictures. The point at (x, y) of the visible part stays where it is.
function setZoom(value, x, y) {
  const before = zoom;
  zoom = Math.min(MAX_ZOOM, Math.max(MIN_ZOOM, value));
  for (const place of places()) {
    const [across, down] = [x ?? place.clientWidth / 2, y ?? place.clientHeight / 2];
    const [left, top] = [place.scrollLeft + across, place.scrollTop + down];
    place.style.setProperty("--zoom", zoom);
    place.scrollTo(left * zoom / before - across, top * zoom / before - down);
  }
}

function visible() {
  return views.find(view => !view.hidden).querySelector(".scroll");
}

for (const button of document.querySelectorAll("[data-zoom]"))
  button.addEventListener("click", () => setZoom(button.dataset.zoom ? zoom * button.dataset.zoom : whole(visible())));

for (const place of places()) {
  let from = null;
  place.addEventListener("wheel", event => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const box = place.getBoundingClientRect();
    setZoom(zoom * Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
  }, {passive: false});
  place.addEventListener("pointerdown", event => {
    if (event.pointerType === "mouse" && event.button === 0) from = [event.clientX + place.scrollLeft, event.clientY + place.scrollTop];
  });
  place.addEventListener("pointermove", event => {
    if (!from) return;
    const [x, y] = [from[0] - event.clientX, from[1] - event.clientY];
    if (!place.classList.contains("dragged") && Math.hypot(x - place.scrollLeft, y - place.scrollTop) < 4) return;
    place.classList.add("dragged");
    place.scrollTo(x, y);
  });
  for (const name of ["pointerup", "pointerleave"]) place.addEventListener(name, () => {
    from = null;
    setTimeout(() => place.classList.remove("dragged"));
  });
  place.addEventListener("click", event => {
    if (place.classList.contains("dragged")) event.stopPropagation();
  }, true);
}

for (const box of document.querySelectorAll(".box[role], .edge[role]")) {
  box.addEventListener("click", () => toggle(box));
  box.addEventListener("keydown", event => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    toggle(box);
  });
}
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || !open) return;
  open.focus();
  close();
});
details.querySelector("button").addEventListener("click", close);
if (slider) {
  slider.addEventListener("input", () => show(Number(slider.value)));
  show(Number(slider.value));
}
setZoom(Math.max(READABLE, whole(visible())));
