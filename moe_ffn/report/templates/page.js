"use strict";
// Draw the plots of #plots in the colours of the style sheet, and redraw them when the colours change.
(() => {
  if (typeof Plotly === "undefined") {
    const notice = document.createElement("p");
    notice.className = "bad";
    notice.textContent =
      "No plots: plotly.min.js, which the pages of this folder share, is missing. Restore the file, or write " +
      "the page again.";
    document.querySelector("header").after(notice);
    return;
  }
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const chosen = {};
  const PRINT_WIDTH = 680; // CSS pixels between the margins of an A4 or letter page
  const printing = matchMedia("print");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const fingers = matchMedia("(pointer: coarse)");

  const colour = (role) =>
    getComputedStyle(document.documentElement).getPropertyValue(`--${role}`).trim();

  function paint(trace) {
    const role = trace.meta && trace.meta.colour;
    if (role !== undefined) {
      const found = colour(typeof role === "number" ? `series-${role}` : role);
      for (const part of [trace.line, trace.marker, trace.error_x, trace.error_y]) {
        if (part) part.color = found;
      }
    }
    if (trace.meta && trace.meta.fill !== undefined) {
      trace.fillcolor = `${colour(`series-${trace.meta.fill}`)}24`;
    }
    if (trace.meta && trace.meta.stops) {
      trace.colorscale = Object.entries(trace.meta.stops).map(([role, at]) => [at, colour(role)]);
    }
    if (trace.colorbar) trace.colorbar.outlinecolor = colour("line");
    return trace;
  }

  function paintLayout(layout) {
    const ink = colour("ink");
    const line = colour("line");
    for (const axis of [layout.xaxis, layout.yaxis]) {
      Object.assign(axis, { gridcolor: line, zerolinecolor: line, linecolor: line, showline: true });
    }
    for (const band of layout.shapes || []) {
      band.fillcolor = band.line.color = colour("good");
    }
    Object.assign(layout.xaxis, { spikecolor: colour("quiet"), spikethickness: 1, spikedash: "dot" });
    return Object.assign(layout, {
      paper_bgcolor: colour("paper"), // saved pictures need a background
      plot_bgcolor: colour("paper"),
      font: { family: "system-ui, sans-serif", size: 12, color: ink },
      hoverlabel: { bgcolor: colour("panel"), bordercolor: line, font: { color: ink } },
      modebar: { bgcolor: colour("paper"), color: colour("quiet"), activecolor: colour("accent") },
      width: printing.matches ? PRINT_WIDTH : undefined,
      autosize: !printing.matches,
      // On a touch screen, dragging scrolls the page.
      dragmode: fingers.matches ? false : "zoom",
    });
  }

  // A folded plot has no width.
  const isShown = (name) => document.getElementById(name).checkVisibility();

  function draw(name) {
    const figure = plots[name][chosen[name] || 0];
    figure.data.forEach(paint);
    return Plotly.react(name, figure.data, paintLayout(figure.layout), {
      responsive: true,
      displaylogo: false,
      displayModeBar: fingers.matches ? false : "hover",
      modeBarButtons: [["toImage", "resetScale2d"]],
    }).then((plot) => {
      // A screen reader reads the title and the last values, not every number on an axis.
      const lines = figure.data.map((trace) => trace.name).filter(Boolean);
      plot.querySelectorAll(".main-svg").forEach((svg, number) => {
        svg.setAttribute("role", "img");
        svg.setAttribute("aria-label", [plot.ariaLabel, ...lines].join(", "));
        if (number) svg.setAttribute("aria-hidden", "true");
      });
    });
  }

  // Draw all visible plots, and record their colours in data-drawn.
  async function drawAll() {
    const colours = `${colour("paper")} ${colour("ink")}`;
    await Promise.all(Object.keys(plots).filter(isShown).map(draw));
    document.documentElement.dataset.drawn = colours;
  }

  // Choices, scroll position, and sections that the reader opened or closed, restored after a reload.
  const memory = `report of ${location.pathname}`;
  function recall() {
    try {
      return JSON.parse(sessionStorage.getItem(memory)) || {};
    } catch {
      return {};
    }
  }
  const sections = [...document.querySelectorAll("details")];
  const asWritten = new Map(sections.map((d) => [d, d.open]));
  const titleOf = (d) => d.querySelector("summary").textContent;
  function remember() {
    try {
      const changed = sections.filter((d) => d.open !== asWritten.get(d));
      const open = Object.fromEntries(changed.map((d) => [titleOf(d), d.open]));
      sessionStorage.setItem(memory, JSON.stringify({ chosen, open, scroll: scrollY }));
    } catch {
      // Without storage, the page starts at the top.
    }
  }

  for (const details of document.querySelectorAll("details:has(.plot)")) {
    details.addEventListener("toggle", () => {
      for (const plot of details.querySelectorAll(".plot")) {
        // The window may have been resized while the plot was folded.
        if (details.open) draw(plot.id).then(() => Plotly.Plots.resize(plot));
      }
    });
  }
  for (const select of document.querySelectorAll("select[data-shows]")) {
    select.addEventListener("change", () => {
      document.querySelectorAll(`.${select.dataset.shows}`).forEach((part, number) => {
        part.hidden = number !== Number(select.value);
      });
    });
  }
  // Show one expert, or all experts again.
  for (const button of document.querySelectorAll("button[data-expert]")) {
    button.addEventListener("click", () => {
      const view = button.closest(".layer-view");
      const alone = button.getAttribute("aria-pressed") !== "true";
      for (const other of view.querySelectorAll("button[data-expert]")) {
        other.setAttribute("aria-pressed", String(alone && other === button));
      }
      for (const text of view.querySelectorAll("i[data-expert]")) {
        text.classList.toggle("off", alone && text.dataset.expert !== button.dataset.expert);
      }
    });
  }
  for (const select of document.querySelectorAll("select[data-plot]")) {
    select.addEventListener("change", () => {
      chosen[select.dataset.plot] = Number(select.value);
      draw(select.dataset.plot);
    });
  }
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const d of closed) d.open = true;
  });
  addEventListener("afterprint", () => {
    for (const d of closed) d.open = false;
  });
  printing.addEventListener("change", drawAll);
  dark.addEventListener("change", drawAll);

  const reload = document.getElementById("reload");
  const before = reload ? recall() : {};
  for (const select of document.querySelectorAll("select[data-plot]")) {
    const number = (before.chosen || {})[select.dataset.plot];
    if (number < plots[select.dataset.plot].length) {
      chosen[select.dataset.plot] = number;
      select.value = String(number);
    }
  }
  for (const d of sections) {
    d.open = (before.open || {})[titleOf(d)] ?? d.open;
  }
  drawAll().then(() => {
    if (before.scroll) scrollTo(0, before.scroll);
  });
  if (reload) {
    setInterval(() => {
      if (!reload.checked || document.hidden) return;
      remember();
      location.reload();
    }, 1000 * Number(reload.dataset.seconds));
  }
})();
