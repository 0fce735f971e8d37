"""The explorer's page before its script has run: headings, numbers, controls and empty places for what is chosen."""

from __future__ import annotations

import math
from typing import Any

from trailmark.report.markup import Html, count, element, paragraph

_KEYS = (
    ("on the strip: ← →", "previous, next chunk"),
    ("↑ ↓", "ten chunks back, on"),
    ("Page Up, Page Down", "a hundred chunks back, on"),
    ("Home, End", "first, last chunk"),
    ("[ ]", "move the view by half of it"),
    ("anywhere: j k", "next, previous chunk"),
    ("+ −", "zoom in, out"),
    ("0", "the whole text"),
    ("z", "zoom to the chosen chunk"),
    ("/", "search; Enter and Shift + Enter go through the matches, Escape ends"),
    ("n p", "next, previous match"),
    ("g", "go to a chunk or a percentage"),
    ("?", "these keys"),
)
_SHADES = (("read", "times read"), ("gain", "gain"), ("age", "age of what it reads"))
_DISTANCES = ((0, "any distance"), (512, "512 tokens"), (2048, "2,048"), (8192, "8,192"), (32768, "32,768"))
_SORTS = (("weight", "weight"), ("distance", "distance"), ("gain", "weight × gain of the reading chunk"))


def frame(about: dict[str, Any]) -> Html:
    """The page's body. ``about`` is what the page says of itself: see :mod:`trailmark.report.explorer`."""
    return Html(
        element("a", "Skip to the chosen chunk", class_="skip", href="#chosen")
        + _top(about)
        + element("main", _map(about), _chosen(), _retrievals(about), id="app", hidden="", aria_busy="true")
        + _help()
        + element("div", id="tip", hidden="", aria_hidden="true")
        + element("footer", paragraph(_made(about)))
    )


def _top(about: dict[str, Any]) -> Html:
    bearing = max(1, about["bearing"])
    loss, without = about["loss"] / bearing, about["loss_without"] / bearing
    tiles = (
        (count(about["tokens"]), "tokens", f"in {count(about['chunks'])} chunks", None),
        (f"{loss:.4f}", "nats a token, with retrieval", f"perplexity {_perplexity(loss)}", "loss"),
        (
            f"{without:.4f}",
            "nats a token, retrieval off",
            f"perplexity {_perplexity(without)}",
            "loss-without",
        ),
        (
            f"{about['helped'] / bearing:.1%}",
            "of the tokens cost less with retrieval",
            "both losses are computed",
            "helped",
        ),
    )
    entries = [
        element(
            "li",
            element("span", shown, class_="figure", id=name),
            element("span", what, class_="what"),
            element("span", how, class_="how"),
        )
        for shown, what, how, name in tiles
    ]
    return element(
        "header",
        element(
            "div",
            paragraph("trailmark explorer", class_="kicker"),
            Html('<button id="help-open" type="button">Keys</button>'),
            Html('<button id="theme" type="button" hidden>Dark</button>'),
            class_="bar",
        ),
        element("h1", element("bdi", about["title"])),
        paragraph(_model(about), class_="lead"),
        element("ul", *entries, class_="tiles"),
        Html('<p id="status" role="status">Loading the text …</p>'),
        class_="top",
    )


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.2f}" if loss < 50 else "beyond all bounds"


def _model(about: dict[str, Any]) -> str:
    groups, name, most = about["num_groups"], about["group_name"], about["num_retrieved_chunks"]
    many = f"{groups} {name}{'s' * (groups != 1)} that read{'s' * (groups == 1)}"
    if any(array["name"] == "read_rest" for array in about["arrays"]):
        of = f"past chunks of {about['chunk_size']} tokens, of which the {most} with the largest weights are shown"
    else:
        of = f"up to {most} past chunks of {about['chunk_size']} tokens"
    parts = [str(about["model"].get("name", "a model")), f"{many} {of}"]
    if about["window"]:
        parts.append(f"a window of {count(about['window'])} positions")
    return "; ".join(parts) + "."


def _made(about: dict[str, Any]) -> str:
    weights = str(about["model"].get("weights_sha256", ""))[:12]
    of = f" Weights {weights}…" if weights else ""
    return f"Made by trailmark {about['version']} on {about['date']}.{of} This page asks the network for nothing."


def _button(name: str, text: str, label: str | None = None) -> Html:
    return element("button", text, id=name, type="button", aria_label=label)


def _select(name: str, label: str, options: Any) -> Html:
    entries = [element("option", text, value=value) for value, text in options]
    return element("label", f"{label} ", element("select", *entries, id=name))


def _map(about: dict[str, Any]) -> Html:
    shades = [
        element(
            "label",
            element("input", type="radio", name="shade", value=value, checked="" if n == 0 else None),
            f" {text}",
        )
        for n, (value, text) in enumerate(_SHADES)
    ]
    legend = element(
        "div",
        element("span", id="legend-low"),
        element("span", id="legend-bar", class_="ramp", aria_hidden="true"),
        element("span", id="legend-high"),
        element("span", id="legend-note"),
        element("span", id="legend-none", class_="legend-none", hidden=""),
        class_="legend",
    )
    zoom = element(
        "div",
        _button("zoom-out", "−", "Zoom out"),
        _button("zoom-in", "+", "Zoom in"),
        _button("zoom-all", "Whole text"),
        _button("zoom-chunk", "Chosen chunk"),
        class_="buttons",
        role="group",
        aria_label="View",
    )
    find = element(
        "div",
        element(
            "label",
            "Search ",
            Html('<input id="search" type="search" autocomplete="off" spellcheck="false">'),
        ),
        element(
            "span",
            _button("search-previous", "↑", "Previous match"),
            _button("search-next", "↓", "Next match"),
        ),
        element("span", id="matches", role="status"),
        element(
            "form",
            element(
                "label",
                "Go to ",
                Html('<input id="jump" autocomplete="off" placeholder="chunk or 42%" size="13">'),
            ),
            element("button", "Go", type="submit"),
            id="jump-form",
        ),
        class_="find",
        role="search",
    )
    strip = element(
        "div",
        element("canvas", id="overview", aria_hidden="true"),
        element(
            "canvas",
            id="strip",
            tabindex="0",
            role="slider",
            aria_label="The text as a strip of chunks. Arrow keys choose a chunk.",
            aria_valuemin="0",
            aria_valuemax=about["chunks"] - 1,
            aria_valuenow="0",
        ),
        class_="strip",
    )
    return element(
        "section",
        element("h2", "The text", id="map-heading"),
        find,
        element(
            "div",
            element("fieldset", element("legend", "Shade by"), *shades),
            zoom,
            class_="controls",
        ),
        strip,
        legend,
        paragraph(
            "Above the strip: what the chosen chunk read; below it: who read it; thicker where it weighed more, in the "
            "colours of the groups below. Where several chunks share a column, its upper edge "
            "shows their extreme, the rest their mean.",
            class_="fine",
        ),
        aria_labelledby="map-heading",
    )


def _chosen() -> Html:
    def figure(name: str, what: str, more: Html | str = "") -> Html:
        return element("div", element("dt", what), element("dd", element("span", id=name), more))

    facts = element(
        "dl",
        figure("gain", "gain, nats", element("small", id="gain-per-token")),
        figure("chunk-loss", "loss a token"),
        figure("chunk-loss-without", "with retrieval off"),
        figure("times-read", "times read later"),
        figure("age", "tokens back, mean"),
        class_="facts",
    )
    legend = element(
        "p",
        element("span", class_="end", data_gain_end="-1"),
        element("span", id="token-bar", class_="diverging", aria_hidden="true"),
        element("span", class_="end", data_gain_end="1"),
        " nats: what retrieval took off a token’s loss",
        class_="legend",
    )

    def extremes(name: str, title: str) -> Html:
        heads = [element("th", text, scope="col") for text in ("token", "gain", "loss", "retrieval off")]
        return element(
            "table",
            element("caption", title),
            element("thead", element("tr", *heads)),
            element("tbody", id=name),
        )

    tables = element(
        "details",
        element("summary", "Tokens that retrieval helped and hurt most"),
        element("div", extremes("most-helped", "helped"), extremes("most-hurt", "hurt"), class_="pair"),
    )
    own = element(
        "div",
        element(
            "div",
            element("h2", "Chunk", id="chunk-number"),
            element("span", id="chunk-place"),
            element(
                "span",
                _button("previous", "←", "Previous chunk"),
                _button("next", "→", "Next chunk"),
                class_="buttons",
            ),
            class_="heading",
        ),
        facts,
        element(
            "div",
            id="chunk-text",
            dir="ltr",
            tabindex="0",
            role="region",
            aria_label="Text of the chosen chunk",
        ),
        legend,
        tables,
        class_="own-part",
    )
    read = element(
        "div",
        element("h3", "What it read"),
        element(
            "p",
            "Words that stand in few chunks, but in this one too, are underlined.",
            id="shared",
            class_="fine",
            hidden="",
        ),
        element("div", id="reads"),
        class_="read-part",
    )
    readers = element(
        "div",
        element("h3", "Who read it"),
        element("p", "No later chunk.", id="nobody", class_="fine"),
        element("ol", id="read-by"),
        Html('<button id="more-readers" type="button" hidden></button>'),
        class_="readers-part",
    )
    return element(
        "section",
        element("div", own),  # as high as what was read beside it: within it the text stays in view
        read,
        readers,
        id="chosen",
        tabindex="-1",
        aria_labelledby="chunk-number",
    )


def _retrievals(about: dict[str, Any]) -> Html:
    name = about["group_name"]
    groups = [(-1, "all"), *((g, f"{g}") for g in range(about["num_groups"]))]
    heads = ("reading", "read", name, "weight", "tokens back", "gain of the reader", "text of what was read")
    return element(
        "section",
        element("h2", "The strongest retrievals", id="strongest-heading"),
        element(
            "div",
            _select("sort", "Sort by", _SORTS),
            _select("far", "at least", _DISTANCES),
            _select("which-group", name, groups),
            class_="controls left",
        ),
        element(
            "div",
            element(
                "table",
                element("thead", element("tr", *(element("th", text, scope="col") for text in heads))),
                element("tbody"),
                id="strongest",
                aria_labelledby="strongest-heading",
            ),
            class_="scroll",
            role="region",
            tabindex="0",
            aria_label="The strongest retrievals",
        ),
        element(
            "p",
            _button("list-previous", "←", "Previous rows"),
            element("span", id="list-place", role="status"),
            _button("list-next", "→", "Next rows"),
            class_="buttons pages",
        ),
        aria_labelledby="strongest-heading",
    )


def _help() -> Html:
    rows = [Html(element("dt", keys) + element("dd", what)) for keys, what in _KEYS]
    return element(
        "dialog",
        element("h2", "Keys", id="help-heading"),
        element("dl", *rows),
        paragraph("On the strip: the wheel zooms, dragging moves, two fingers zoom, a click chooses."),
        Html('<form method="dialog"><button>Close</button></form>'),
        id="help",
        aria_labelledby="help-heading",
    )
