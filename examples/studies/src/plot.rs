//! Plots as SVG: panels beside each other, series of estimates with their intervals, colours for light and dark pages.

use crate::stats::Estimate;
use svg::Document;
use svg::node::element::{Circle, Group, Line, Polygon, Polyline, Rectangle, Style, Text, Title};

/// A picture of one study.
#[derive(Clone, Debug)]
pub struct Figure {
    pub title: String,
    pub panels: Vec<Panel>,
}

#[derive(Clone, Debug)]
pub struct Panel {
    pub title: String,
    pub x: Across,
    /// Quantity and unit, along the vertical axis.
    pub y: String,
    /// Estimates above it are drawn at it, with their value: one that is far off doesn't hide the others.
    pub y_limit: Option<f64>,
    pub series: Vec<Series>,
}

/// The horizontal axis.
#[derive(Clone, Debug)]
pub enum Across {
    /// Quantity and unit.
    Linear(String),
    /// What the names are, and the names; x is an index into them, and series stand beside each other.
    Names(String, Vec<String>),
}

#[derive(Clone, Debug)]
pub struct Series {
    pub name: String,
    /// x and y.
    pub points: Vec<(f64, Estimate)>,
    pub shape: Shape,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A dot with a bar for its interval.
    Dots,
    /// Dots with a line through them.
    DotsAndLine,
    /// A line in the band of its intervals.
    Band,
}

const PANEL_WIDTH: f64 = 540.0;
const HEIGHT: f64 = 400.0;
/// Margins of a panel around its axes.
const LEFT: f64 = 76.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 92.0;
const BOTTOM: f64 = 58.0;
/// Series that have a colour of their own.
pub const COLOURS: usize = 4;
/// Between the dots of neighbouring series at one name.
const DODGE: f64 = 14.0;

const CSS: &str = "
  .bg { fill: #ffffff } .ink { fill: #1d2733 } .dim { fill: #5b6875 }
  .axis { stroke: #8793a0; stroke-width: 1 } .grid { stroke: #e3e7ec; stroke-width: 1 }
  .s0 { color: #0067a5 } .s1 { color: #c85000 } .s2 { color: #00805c } .s3 { color: #8048b0 }
  .dot { fill: currentColor } .bar { stroke: currentColor; stroke-width: 1.5 }
  .line { stroke: currentColor; stroke-width: 1.6; fill: none } .band { fill: currentColor; fill-opacity: 0.18 }
  text { font-family: system-ui, sans-serif; font-size: 12px }
  .t { font-size: 15px; font-weight: 600 } .h { font-size: 13px; font-weight: 600 } .v { fill: currentColor; font-size: 11px }
  @media (prefers-color-scheme: dark) {
    .bg { fill: #14191f } .ink { fill: #e6ebf0 } .dim { fill: #98a5b3 } .axis { stroke: #5c6975 } .grid { stroke: #29323b }
    .s0 { color: #5cb8f0 } .s1 { color: #f39a5c } .s2 { color: #45cba0 } .s3 { color: #c89aee }
  }";

/// Draws a figure; panels without points stay out.
pub fn draw(figure: &Figure) -> Document {
    let panels: Vec<&Panel> = figure.panels.iter().filter(|p| p.series.iter().any(|s| !s.points.is_empty())).collect();
    let width = PANEL_WIDTH * panels.len().max(1) as f64;
    let mut document = Document::new()
        .set("viewBox", (0, 0, width, HEIGHT))
        .set("role", "img")
        .set("aria-label", figure.title.as_str())
        .add(Style::new(CSS))
        .add(Rectangle::new().set("width", width).set("height", HEIGHT).set("class", "bg"))
        .add(text(LEFT, 24.0, &figure.title, "ink t"));
    for (n, panel) in panels.into_iter().enumerate() {
        let move_by = format!("translate({} 0)", n as f64 * PANEL_WIDTH);
        document = document.add(Frame::new(panel).draw().set("transform", move_by));
    }
    document
}

/// A panel with the scales of its axes.
struct Frame<'a> {
    panel: &'a Panel,
    x: (f64, f64),
    y: (f64, f64),
}

impl<'a> Frame<'a> {
    fn new(panel: &'a Panel) -> Frame<'a> {
        let points = || panel.series.iter().flat_map(|s| &s.points);
        let x = match &panel.x {
            Across::Names(_, names) => (-0.5, names.len() as f64 - 0.5),
            Across::Linear(_) => range(points().map(|p| p.0), 0.0),
        };
        let limit = panel.y_limit.unwrap_or(f64::INFINITY);
        let y = range(points().flat_map(|p| [p.1.low(), p.1.mean, p.1.high()]).map(|v| v.min(limit)), 0.08);
        Frame { panel, x, y }
    }

    fn x(&self, value: f64) -> f64 {
        LEFT + (value - self.x.0) / (self.x.1 - self.x.0) * (PANEL_WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        let share = ((value - self.y.0) / (self.y.1 - self.y.0)).clamp(0.0, 1.0);
        HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)
    }

    fn draw(&self) -> Group {
        let mut group = Group::new().add(text(LEFT, 48.0, &self.panel.title, "ink h")).add(self.axes());
        let mut x = LEFT;
        for (n, series) in self.panel.series.iter().enumerate() {
            let class = format!("s{}", n % COLOURS);
            let key = Group::new().set("class", class.as_str()).add(dot(x + 5.0, 66.0));
            group = group.add(key).add(text(x + 15.0, 70.0, &series.name, "dim"));
            x += 34.0 + 6.4 * series.name.chars().count() as f64;
            group = group.add(self.series(n, series).set("class", class));
        }
        group
    }

    fn axes(&self) -> Group {
        let (bottom, right) = (HEIGHT - BOTTOM, PANEL_WIDTH - RIGHT);
        let mut group = Group::new();
        for value in ticks(self.y) {
            let y = self.y(value);
            let class = if value == 0.0 { "axis" } else { "grid" };
            group = group.add(line((LEFT, y), (right, y), class));
            group = group.add(text(LEFT - 8.0, y + 4.0, &number(value), "dim").set("text-anchor", "end"));
        }
        let (label, names) = match &self.panel.x {
            Across::Linear(label) => (label, ticks(self.x).into_iter().map(|v| (v, number(v))).collect()),
            Across::Names(label, names) => {
                (label, names.iter().enumerate().map(|(n, name)| (n as f64, name.clone())).collect::<Vec<_>>())
            }
        };
        for (value, name) in names {
            let x = self.x(value);
            group = group.add(line((x, bottom), (x, bottom + 5.0), "axis"));
            group = group.add(text(x, bottom + 20.0, &name, "dim").set("text-anchor", "middle"));
        }
        let middle = (LEFT + right) / 2.0;
        let turn = format!("rotate(-90 16 {})", (TOP + bottom) / 2.0);
        group
            .add(line((LEFT, bottom), (right, bottom), "axis"))
            .add(line((LEFT, TOP), (LEFT, bottom), "axis"))
            .add(text(middle, bottom + 42.0, label, "ink").set("text-anchor", "middle"))
            .add(
                text(16.0, (TOP + bottom) / 2.0, &self.panel.y, "ink")
                    .set("text-anchor", "middle")
                    .set("transform", turn),
            )
    }

    fn series(&self, n: usize, series: &Series) -> Group {
        let beside = match self.panel.x {
            Across::Names(..) => DODGE * (n as f64 - (self.panel.series.len() as f64 - 1.0) / 2.0),
            Across::Linear(_) => 0.0,
        };
        let place = |x: f64, y: f64| (round(self.x(x) + beside), round(self.y(y)));
        let path = |y: fn(&Estimate) -> f64| series.points.iter().map(move |(x, e)| place(*x, y(e)));
        let list =
            |points: Vec<(f64, f64)>| points.iter().map(|(x, y)| format!("{x},{y}")).collect::<Vec<_>>().join(" ");
        let mut group = Group::new();
        if series.shape == Shape::Band {
            let edge = path(Estimate::high).chain(path(Estimate::low).rev()).collect();
            group = group.add(Polygon::new().set("points", list(edge)).set("class", "band"));
        }
        if series.shape != Shape::Dots {
            group = group.add(Polyline::new().set("points", list(path(|e| e.mean).collect())).set("class", "line"));
        }
        if series.shape == Shape::Band {
            return group;
        }
        for (x, estimate) in &series.points {
            let at = place(*x, estimate.mean);
            let name = format!("{}: {}", series.name, estimate.text(4, false));
            group = group.add(Group::new().add(Title::new(name)).add(dot(at.0, at.1)));
            group = group.add(line(place(*x, estimate.low()), place(*x, estimate.high()), "bar"));
            if self.panel.y_limit.is_some_and(|limit| estimate.mean > limit) {
                group = group.add(text(at.0 + 7.0, at.1 + 4.0, &format!("↑ {:.2}", estimate.mean), "v"));
            }
        }
        group
    }
}

/// The values' range, widened by a share of itself on both sides.
fn range(values: impl Iterator<Item = f64>, widen: f64) -> (f64, f64) {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    if !(low < high) {
        let middle = if low.is_finite() { low } else { 0.0 };
        return (middle - 0.5, middle + 0.5);
    }
    let pad = (high - low) * widen;
    (low - pad, high + pad)
}

/// Round values of a range, four to nine.
fn ticks((low, high): (f64, f64)) -> Vec<f64> {
    let raw = (high - low) / 6.0;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|f| f * power).into_iter().find(|&s| s >= raw * 0.999).unwrap_or(power);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last).map(|n| n as f64 * step).collect()
}

/// Without the digits that rounding left.
fn number(value: f64) -> String {
    let text = format!("{value:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn dot(x: f64, y: f64) -> Circle {
    Circle::new().set("cx", x).set("cy", y).set("r", 4).set("class", "dot")
}

fn line(from: (f64, f64), to: (f64, f64), class: &str) -> Line {
    let (x1, y1, x2, y2) = (round(from.0), round(from.1), round(to.0), round(to.1));
    Line::new().set("x1", x1).set("y1", y1).set("x2", x2).set("y2", y2).set("class", class)
}

fn text(x: f64, y: f64, content: &str, class: &str) -> Text {
    Text::new(content).set("x", round(x)).set("y", round(y)).set("class", class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks((0.0, 6.0)), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let fine = ticks((2.0312, 2.0349));
        assert!(fine.len() >= 3 && fine.iter().all(|v| (2.0312..=2.0349).contains(v)), "{fine:?}");
        assert_eq!(number(2.0320000000001), "2.032");
        assert_eq!(number(-0.0), "0");
    }

    #[test]
    fn a_figure_shows_what_it_is_given() {
        let estimate = |mean, half| Estimate { mean, half };
        let series = |shape| Series {
            name: "async".to_owned(),
            points: vec![(0.0, estimate(1.0, Some(0.1))), (1.0, estimate(9.0, None))],
            shape,
        };
        let panel = |x, shape| Panel {
            title: "t".to_owned(),
            x,
            y: "loss, nats".to_owned(),
            y_limit: Some(2.0),
            series: vec![series(shape)],
        };
        let names = Across::Names("K".to_owned(), vec!["2".to_owned(), "4".to_owned()]);
        let empty = Panel { series: Vec::new(), ..panel(Across::Linear("s".to_owned()), Shape::Dots) };
        let panels = vec![panel(names, Shape::Dots), panel(Across::Linear("s".to_owned()), Shape::Band), empty];
        let drawn = draw(&Figure { title: "f".to_owned(), panels }).to_string();
        assert!(drawn.contains("viewBox=\"0 0 1080 400\""), "two panels of three have points");
        assert!(drawn.contains("↑ 9.00") && drawn.contains("polygon") && drawn.contains("loss, nats"), "{drawn}");
        assert!(!drawn.contains("NaN") && !drawn.contains("inf"));
    }
}
