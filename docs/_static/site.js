// Name furo's two side bars, and let the keyboard reach boxes that scroll.
addEventListener("load", () => {
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "all pages");
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "this page");
  for (const box of document.querySelectorAll("pre, .table-wrapper")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
});
