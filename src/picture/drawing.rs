//! The timeline as an SVG picture: a lane per rank, a box per action, time to the right.

use super::letter;
use artifact::stream::Op;
use plan::time::Timed;
use svg::Document;
use svg::node::element::{Group, Line, Rectangle, Style, Text, Title};

const LANE_HEIGHT: f64 = 34.0;
const LANE_GAP: f64 = 6.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 52.0;
const WIDTH: f64 = 1100.0;
/// Boxes narrower than this carry no number.
const LABEL_WIDTH: f64 = 14.0;

const CSS: &str = "
  .bg { fill: #ffffff } .lane { fill: #eceff3 } .ink { fill: #1d2733 } .dim { fill: #5b6875 } .axis { stroke: #aab4bf }
  .f { fill: #4a86c8 } .b { fill: #d9803a } .w { fill: #b9a13c } .u { stroke: #2d8a57; stroke-width: 2.5 }
  .n { fill: #ffffff; font-size: 11px; text-anchor: middle }
  text { font-family: system-ui, sans-serif; font-size: 12px }
  .t { font-size: 15px; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .bg { fill: #14191f } .lane { fill: #222a33 } .ink { fill: #e6ebf0 } .dim { fill: #98a5b3 } .axis { stroke: #46525f }
  }";

/// Draws `events` (nanoseconds) of `ranks` ranks under a title.
pub fn timeline(title: &str, ranks: usize, events: &[Timed]) -> Document {
    let end_ns = events.iter().map(|e| e.end_ns).max().unwrap_or(0).max(1);
    let scale = (WIDTH - LEFT - 16.0) / end_ns as f64;
    let height = TOP + ranks as f64 * (LANE_HEIGHT + LANE_GAP) + 34.0;
    let mut document = Document::new()
        .set("viewBox", (0, 0, WIDTH, height))
        .set("role", "img")
        .set("aria-label", title)
        .add(Style::new(CSS))
        .add(rect(0.0, 0.0, WIDTH, height, "bg"))
        .add(text(LEFT, 22.0, title, "ink t"))
        .add(legend(events));
    for rank in 0..ranks {
        let y = lane_y(rank);
        document = document.add(text(10.0, y + LANE_HEIGHT / 2.0 + 4.0, &format!("rank {rank}"), "ink")).add(rect(
            LEFT,
            y,
            WIDTH - LEFT - 16.0,
            LANE_HEIGHT,
            "lane",
        ));
    }
    for event in events {
        document = document.add(action(event, scale));
    }
    axis(document, ranks, end_ns, scale)
}

fn lane_y(rank: usize) -> f64 {
    TOP + rank as f64 * (LANE_HEIGHT + LANE_GAP)
}

fn action(event: &Timed, scale: f64) -> Group {
    let (x, y) = (LEFT + event.start_ns as f64 * scale, lane_y(event.rank.index()));
    let width = (event.end_ns - event.start_ns) as f64 * scale;
    let Some(letter) = letter(event.op) else { return Group::new() };
    let class = match event.op {
        Op::F => "f",
        Op::W(_) => "w",
        Op::U => "u",
        _ => "b",
    };
    let from = event.start_ns as f64 / 1e3;
    let to = event.end_ns as f64 / 1e3;
    let hover = Title::new(format!("{letter}{} stage {} · {from:.1}–{to:.1} us", event.mb, event.stage));
    if event.op == Op::U {
        let line = Line::new().set("x1", x).set("x2", x).set("y1", y - 3.0).set("y2", y + LANE_HEIGHT + 3.0);
        return Group::new().add(hover).add(line.set("class", class));
    }
    let body = rect(x, y + 1.0, (width - 1.0).max(0.5), LANE_HEIGHT - 2.0, class).set("rx", 2);
    let group = Group::new().add(hover).add(body);
    if width < LABEL_WIDTH {
        return group;
    }
    group.add(text(x + width / 2.0, y + LANE_HEIGHT / 2.0 + 4.0, &event.mb.to_string(), "n"))
}

/// Names the kinds of action that occur.
fn legend(events: &[Timed]) -> Group {
    let split = events.iter().any(|e| e.op == Op::I);
    let backward = if split { "input gradient" } else { "backward" };
    let mut group = Group::new();
    let mut x = LEFT;
    for (class, name) in [("f", "forward"), ("b", backward), ("w", "weight gradient")] {
        if class == "w" && !split {
            continue;
        }
        group = group.add(rect(x, 32.0, 12.0, 12.0, class)).add(text(x + 17.0, 42.0, name, "dim"));
        x += 40.0 + 6.6 * name.len() as f64;
    }
    let update = Line::new().set("x1", x + 6.0).set("x2", x + 6.0).set("y1", 31.0).set("y2", 45.0).set("class", "u");
    group.add(update).add(text(x + 14.0, 42.0, "optimizer update", "dim"))
}

fn axis(mut document: Document, ranks: usize, end_ns: u64, scale: f64) -> Document {
    let y = lane_y(ranks) + 2.0;
    let step_ns = round_step(end_ns);
    for tick in 0..=(end_ns / step_ns) {
        let ns = tick * step_ns;
        let x = LEFT + ns as f64 * scale;
        let mark = Line::new().set("x1", x).set("x2", x).set("y1", y).set("y2", y + 5.0).set("class", "axis");
        document = document.add(mark).add(text(x, y + 18.0, &time(ns), "dim").set("text-anchor", "middle"));
    }
    document
}

/// 1, 2 or 5 times a power of ten, about eight to the axis.
fn round_step(end_ns: u64) -> u64 {
    let raw = (end_ns / 8).max(1);
    let power = 10u64.pow(raw.ilog10());
    [1, 2, 5, 10].into_iter().map(|f| f * power).find(|&s| s >= raw).unwrap_or(power * 10)
}

fn time(ns: u64) -> String {
    match ns {
        0 => "0".to_owned(),
        n if n >= 1_000_000_000 => format!("{} s", n as f64 / 1e9),
        n if n >= 1_000_000 => format!("{} ms", n as f64 / 1e6),
        n => format!("{} us", n as f64 / 1e3),
    }
}

fn rect(x: f64, y: f64, width: f64, height: f64, class: &str) -> Rectangle {
    let round = |v: f64| (v * 100.0).round() / 100.0;
    Rectangle::new()
        .set("x", round(x))
        .set("y", round(y))
        .set("width", round(width))
        .set("height", round(height))
        .set("class", class)
}

fn text(x: f64, y: f64, content: &str, class: &str) -> Text {
    let round = |v: f64| (v * 100.0).round() / 100.0;
    Text::new(content).set("x", round(x)).set("y", round(y)).set("class", class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_steps_are_round() {
        assert_eq!(round_step(8), 1);
        assert_eq!(round_step(100), 20);
        assert_eq!(round_step(7_777), 1000);
    }
}
