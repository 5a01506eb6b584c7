const views = [...document.querySelectorAll(".view")];
const slider = document.getElementById("pass");
const details = document.getElementById("details");
let open = null;

function close() {
  if (open) open.setAttribute("aria-expanded", "false");
  open = null;
  details.hidden = true;
}

function toggle(box) {
  const same = box === open;
  close();
  if (same) return;
  const template = document.querySelector(`template[data-box="${box.id}"]`);
  details.querySelector("h2").textContent = template.dataset.title;
  details.querySelector("pre").textContent = template.content.textContent;
  details.hidden = false;
  box.setAttribute("aria-expanded", "true");
  open = box;
}

function show(index) {
  close();
  views.forEach((view, i) => { view.hidden = i !== index; });
  const {name, note} = views[index].dataset;
  document.querySelector("output").textContent = `after ${name}: ${note}`;
}

for (const box of document.querySelectorAll(".box[role]")) {
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
