"use strict";
// Filters, pages through and downloads the predictions. All text is inserted as text, never as markup.
(() => {
  const PAGE_LINES = 25;
  const root = document.getElementById("predictions");
  if (!root) return;
  const find = selector => root.querySelector(selector);
  const {fields, lines, images, name} = JSON.parse(find("pre").textContent);
  const form = find("form"), body = find("tbody"), [previous, next] = root.querySelectorAll(".pages button");
  const haystacks = lines.map(line => line.slice(1, fields.length).join("\n").toLowerCase());
  let found = [], page = 0;

  const cell = (text, label, kind) => {
    const td = document.createElement("td");
    td.textContent = text;
    td.dir = "auto";
    td.className = kind || "full";
    td.dataset.label = label;
    return td;
  };

  const row = line => {
    const tr = document.createElement("tr"), [correct, slice, question, answer, prediction] = line;
    const thumbnail = document.createElement("td"), shown = images[line[fields.length]];
    if (shown) {
      const image = document.createElement("img");
      [image.src, image.width, image.height] = shown;
      image.alt = `Image of sample ${line[fields.indexOf("id")]}`;
      thumbnail.append(image);
    }
    const verdict = correct ? cell("✓ right", "", "passed") : cell("✕ wrong", "", "missed");
    tr.append(thumbnail, verdict, cell(slice, "Slice"), cell(question, "Question"), cell(answer, "Answer"),
      cell(prediction || "(nothing)", "Predicted"));
    return tr;
  };

  const show = () => {
    const pages = Math.max(1, Math.ceil(found.length / PAGE_LINES));
    body.replaceChildren(...found.slice(page * PAGE_LINES, (page + 1) * PAGE_LINES).map(row));
    find("output").textContent =
      `${found.length.toLocaleString("en")} of ${lines.length.toLocaleString("en")} answers, page ${page + 1} of ${pages}`;
    previous.disabled = page === 0;
    next.disabled = page + 1 >= pages;
  };

  const filter = () => {
    const text = form.elements.text.value.trim().toLowerCase(), verdict = form.elements.verdict.value;
    found = lines.filter((line, i) =>
      (verdict === "all" || line[0] === (verdict === "right")) && haystacks[i].includes(text));
    page = 0;
    show();
  };

  // A spreadsheet would run a cell that starts like a formula.
  const quoted = value => {
    const text = String(value);
    const safe = /^[=@\t\r]|^[+-](?![\d.]+$)/.test(text) ? `'${text}` : text;
    return `"${safe.replaceAll('"', '""')}"`;
  };
  const formats = {
    csv: () => [fields, ...found].map(line => line.slice(0, fields.length).map(quoted).join(",")).join("\r\n") + "\r\n",
    json: () => JSON.stringify(found.map(line => Object.fromEntries(fields.map((field, i) => [field, line[i]]))), null, 1),
  };
  const download = format => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([formats[format]()], {type: "application/octet-stream"}));
    link.download = `${name}-predictions.${format}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  form.addEventListener("input", filter);
  form.addEventListener("submit", event => event.preventDefault());
  previous.addEventListener("click", () => { page -= 1; show(); });
  next.addEventListener("click", () => { page += 1; show(); });
  for (const button of root.querySelectorAll("[data-format]"))
    button.addEventListener("click", () => download(button.dataset.format));
  root.hidden = false;
  filter();
})();
