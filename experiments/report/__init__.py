"""The page of a run, `report.html`: what was trained, how it went, and where every token went.

    python -m experiments.report --help

What is read:
    metrics_file.py  `metrics.csv` as one series per column, also while it is being written
    record.py        a run as one value; whatever its folder lacks is absent
    bins.py          long series as few points

What is drawn, as plotly figures that know no colour (page.js takes those from the style sheet):
    figures.py       axes, lines and heat maps
    curves.py        loss, learning rate, throughput
    routing.py       everything per layer and per expert
    overlay.py       several runs in one plot

What stands around it:
    markup.py        text as HTML, numbers as text
    headline.py      the top of the page: state, results, sizes, alarms
    tables.py        the experts, the runs side by side, the options that differ
    texts.py         what the model wrote, the options, the facts
    page.py          the whole page, and `write_report`
    watch.py         a page that follows a run
    page.js          draws, in the reader's light; report.css: what the shared style sheet lacks

None of it imports torch.
"""
