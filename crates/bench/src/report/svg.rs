// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Draws charts as SVG: curves with a band for their spread, and bars with whiskers. They are drawn by hand, because to
//! instruct a library would take more code. Charts are light or dark, their marks show figures when pointed at, and
//! their labels do not overlap.

use std::fmt::Write;

pub use super::axis::Scale;

use super::axis::Axis;

/// Width of every chart, in the units of its drawing.
const WIDTH: f64 = 880.0;
/// Position of the vertical axis.
const LEFT: f64 = 76.0;
/// Width of the legend besides its longest name.
const LEGEND: f64 = 64.0;
/// Room above the axes for the title and the name of the values.
const TOP: f64 = 64.0;
/// Height of the plane between the axes.
const PLANE: f64 = 360.0;
const BOTTOM: f64 = 56.0;
/// Width of a letter, on the average of a name, at most.
const LETTER: f64 = 7.5;
/// Least distance between labels of the horizontal axis.
const APART: f64 = 50.0;

/// Figure with its spread.
#[derive(Debug, Clone)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    pub low: f64,
    pub high: f64,
    /// Text that is shown when the user points at the mark.
    pub note: String,
    /// Whether it was taken in another placement than the others: drawn pale.
    pub pale: bool,
}

/// One curve.
#[derive(Debug, Clone)]
pub struct Curve {
    pub name: String,
    /// Index of its colour and mark, see [`LOOKS`].
    pub look: usize,
    /// 0 for an unbroken line; other numbers for a yardstick, or for another curve of the same look.
    pub dashes: usize,
    /// Whether the figure does not depend on the horizontal axis: one point, drawn across.
    pub level: bool,
    pub points: Vec<Point>,
}

/// Curves over one axis.
#[derive(Debug, Clone)]
pub struct LinePlot {
    pub title: String,
    pub x_name: String,
    pub y_name: String,
    /// Ticks of the horizontal axis, with their labels.
    pub ticks: Vec<(f64, String)>,
    pub x_scale: Scale,
    pub y_scale: Scale,
    /// Formats a value of the vertical axis.
    pub show: fn(f64) -> String,
    pub curves: Vec<Curve>,
}

/// One bar.
#[derive(Debug, Clone)]
pub struct Bar {
    pub name: String,
    pub look: usize,
    pub point: Point,
}

/// Bars in groups, each under a heading, all on one scale.
#[derive(Debug, Clone)]
pub struct Bars {
    pub title: String,
    pub scale: Scale,
    pub show: fn(f64) -> String,
    pub groups: Vec<(String, Vec<Bar>)>,
}

/// Colours on white and on black. For readers who cannot tell the colours apart, the marks differ too.
pub const LOOKS: [(&str, &str); 18] = [
    ("#0b5fd0", "#62adff"),
    ("#0097a7", "#4dd5e6"),
    ("#d03b4e", "#ff8089"),
    ("#de8a00", "#ffb94f"),
    ("#2f8f3a", "#7ed084"),
    ("#86990a", "#cfe05c"),
    ("#8b3fae", "#d59be6"),
    ("#5f6773", "#a7afba"),
    ("#22262c", "#e8eaed"),
    ("#c2185b", "#f78fb3"),
    ("#ef7fae", "#ffc4da"),
    ("#7a5140", "#c9a793"),
    ("#4a5fc1", "#a3b1f5"),
    ("#a97800", "#e9c85f"),
    ("#00796b", "#80cbc4"),
    ("#6d7f8f", "#b5c3cf"),
    ("#3a3f58", "#c3c7e0"),
    ("#5b6b3a", "#c6d3a3"),
];

/// Returns the style that the charts of a page share; a chart in a file of its own contains it.
pub fn style() -> String {
    let mut css = String::from(
        ".chart{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}\
         .chart text{fill:#24292f}.chart .soft{fill:#5c6570}.chart .title{font-size:16px;font-weight:600}\
         .chart .back{fill:#fff}.chart .grid{stroke:#dfe3e8;stroke-width:1}.chart .fine{stroke:#eff1f4;stroke-width:1}\
         .chart .axis{stroke:#8a929c;stroke-width:1}.chart .curve{fill:none;stroke-width:2.2;stroke-linejoin:round}\
         .chart .whisker{stroke:#24292f;stroke-width:1.2;stroke-opacity:.75}",
    );
    for (i, (light, _)) in LOOKS.iter().enumerate() {
        let _ = write!(css, ".chart .s{i}{{stroke:{light}}}.chart .f{i}{{fill:{light}}}");
    }
    css += "@media (prefers-color-scheme:dark){.chart text{fill:#e3e6ea}.chart .soft{fill:#a4acb6}\
            .chart .back{fill:#14171b}.chart .grid{stroke:#333941}.chart .fine{stroke:#22272d}\
            .chart .axis{stroke:#6b737d}.chart .whisker{stroke:#e3e6ea}";
    for (i, (_, dark)) in LOOKS.iter().enumerate() {
        let _ = write!(css, ".chart .s{i}{{stroke:{dark}}}.chart .f{i}{{fill:{dark}}}");
    }
    css + "}"
}

/// Turns a chart drawn as part of a page into a file of its own.
pub fn file(chart: &str) -> String {
    let head = format!(r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" "#);
    let body = chart.replacen("<svg ", &head, 1);
    body.replacen("</title>", &format!("</title>\n<style>{}</style>", style()), 1)
}

/// Escapes any text for XML.
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            '"' => safe += "&quot;",
            '\'' => safe += "&#39;",
            '\n' | '\t' => safe.push(' '),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

impl LinePlot {
    /// Draws the chart, to be part of a page.
    pub fn draw(&self) -> String {
        let height = (TOP + PLANE + BOTTOM).max(TOP + 24.0 * self.curves.len() as f64);
        let mut svg = open(&self.title, height);
        let points = || self.curves.iter().flat_map(|curve| &curve.points);
        let levels = self.curves.iter().filter(|c| c.level);
        let xs = self.ticks.iter().map(|t| t.0).collect::<Vec<_>>();
        let (left, right) = (LEFT, WIDTH - LEGEND - widest(self.curves.iter().map(|c| c.name.as_str())));
        let plane = Plane {
            x: Axis::exactly(self.x_scale, &xs, left + 18.0, right - 18.0),
            y: Axis::around(self.y_scale, points().flat_map(|p| [p.y, p.low, p.high]), TOP + PLANE, TOP),
        };
        for value in plane.y.fine() {
            line(&mut svg, "fine", [left, right], [plane.y.at(value); 2]);
        }
        for value in plane.y.ticks() {
            let y = plane.y.at(value);
            line(&mut svg, "grid", [left, right], [y; 2]);
            text(&mut svg, r#"class="soft" text-anchor="end""#, [left - 8.0, y + 4.5], &(self.show)(value));
        }
        let floor = TOP + PLANE;
        let mut last = f64::NEG_INFINITY;
        for (value, label) in &self.ticks {
            let x = plane.x.at(*value);
            line(&mut svg, "axis", [x; 2], [floor, floor + 5.0]);
            if x - last >= APART {
                last = x;
                text(&mut svg, r#"class="soft" text-anchor="middle""#, [x, floor + 20.0], label);
            }
        }
        line(&mut svg, "axis", [left, right], [floor; 2]);
        text(&mut svg, r#"text-anchor="middle""#, [f64::midpoint(left, right), floor + 42.0], &self.x_name);
        text(&mut svg, "", [10.0, TOP - 14.0], &self.y_name);

        for curve in levels {
            plane.level(&mut svg, curve, right - left);
        }
        let curves: Vec<_> = self.curves.iter().filter(|c| !c.level).collect();
        curves.iter().for_each(|curve| plane.band(&mut svg, curve));
        // The first curves matter most, so they are drawn last, on top.
        curves.iter().rev().for_each(|curve| plane.curve(&mut svg, curve));
        self.legend(&mut svg, &plane, right);
        svg + "</svg>\n"
    }

    /// Draws the names, in the order in which the curves end.
    fn legend(&self, svg: &mut String, plane: &Plane, left: f64) {
        let end = |c: &&Curve| c.points.last().map_or(f64::INFINITY, |p| plane.y.at(p.y));
        let mut curves: Vec<_> = self.curves.iter().filter(|c| !c.points.is_empty()).collect();
        curves.sort_by(|a, b| end(a).total_cmp(&end(b)));
        for (row, curve) in curves.iter().enumerate() {
            let (x, y) = (left + 18.0, TOP + 10.0 + 24.0 * row as f64);
            let (look, dash, to, middle) = (curve.look % LOOKS.len(), dash(curve), x + 26.0, x + 13.0);
            let _ = writeln!(svg, r#"<path class="curve s{look}"{dash} d="M{x} {y}H{to}"/>"#);
            if !curve.level {
                mark(svg, look, middle, y, "", false);
            }
            text(svg, r#"class="name""#, [to + 8.0, y + 4.5], &curve.name);
        }
    }
}

impl Bars {
    /// Draws the chart, to be part of a page.
    pub fn draw(&self) -> String {
        const ROW: f64 = 26.0;
        const HEAD: f64 = 34.0;
        let headings = self.groups.iter().map(|(heading, _)| heading.as_str());
        let names = self.groups.iter().flat_map(|(_, bars)| bars).map(|bar| bar.name.as_str());
        let left = widest(names).max(widest(headings)) + 26.0;
        let heads = self.groups.iter().filter(|(heading, _)| !heading.is_empty()).count() as f64;
        let rows = self.groups.iter().map(|(_, bars)| bars.len() as f64).sum::<f64>();
        let height = 44.0 + rows * ROW + heads * HEAD + 48.0;
        let mut svg = open(&self.title, height);
        let points = || self.groups.iter().flat_map(|(_, bars)| bars).map(|bar| &bar.point);
        let mut axis = Axis::around(self.scale, points().flat_map(|p| [p.y, p.low, p.high]), left, WIDTH - 110.0);
        if self.scale == Scale::Log {
            // Counts start at one, and the bar of a one must have a length.
            axis.from = axis.from.min(0.5);
        }
        let bottom = height - 40.0;
        let mut last = f64::NEG_INFINITY;
        for value in axis.ticks() {
            let x = axis.at(value);
            line(&mut svg, "grid", [x; 2], [44.0, bottom]);
            if x - last >= 1.3 * APART {
                last = x;
                text(&mut svg, r#"class="soft" text-anchor="middle""#, [x, bottom + 18.0], &(self.show)(value));
            }
        }
        let mut y = 44.0;
        for (heading, bars) in &self.groups {
            text(&mut svg, r#"font-weight="600""#, [10.0, y + 22.0], heading);
            y += if heading.is_empty() { 4.0 } else { HEAD };
            for bar in bars {
                bar_row(&mut svg, &axis, bar, y, self.show);
                y += ROW;
            }
        }
        line(&mut svg, "axis", [axis.at(axis.from); 2], [44.0, bottom]);
        svg + "</svg>\n"
    }
}

fn bar_row(svg: &mut String, axis: &Axis, bar: &Bar, y: f64, show: fn(f64) -> String) {
    let (point, look) = (&bar.point, bar.look % LOOKS.len());
    let (start, middle) = (axis.at(axis.from), y + 9.0);
    text(svg, r#"class="name" text-anchor="end""#, [start - 8.0, middle + 4.5], &bar.name);
    let _ = writeln!(svg, "<g><title>{}</title>", escape(&point.note));
    let long = (axis.at(point.y) - start).max(0.0);
    let pale = if point.pale { r#" fill-opacity=".4""# } else { "" };
    let _ =
        writeln!(svg, r#"<rect class="f{look}"{pale} x="{start:.1}" y="{y}" width="{long:.1}" height="18" rx="2"/>"#);
    let mut end = start + long;
    if point.high > point.low {
        let (low, high) = (axis.at(point.low).max(start), axis.at(point.high).max(start));
        let (up, down) = (middle - 4.0, middle + 4.0);
        let d = format!("M{low:.1} {up}V{down}M{low:.1} {middle}H{high:.1}M{high:.1} {up}V{down}");
        let _ = writeln!(svg, r#"<path class="whisker" d="{d}"/>"#);
        end = end.max(high);
    }
    text(svg, "", [end + 7.0, middle + 4.5], &show(point.y));
    *svg += "</g>\n";
}

fn open(title: &str, height: f64) -> String {
    let mut svg = format!(
        "<svg class=\"chart\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n<title>{}</title>\n\
         <rect class=\"back\" width=\"{WIDTH}\" height=\"{height}\"/>\n",
        escape(title)
    );
    text(&mut svg, r#"class="title""#, [10.0, 26.0], title);
    svg
}

fn line(svg: &mut String, class: &str, [x1, x2]: [f64; 2], [y1, y2]: [f64; 2]) {
    let _ = writeln!(svg, r#"<line class="{class}" x1="{x1:.1}" x2="{x2:.1}" y1="{y1:.1}" y2="{y2:.1}"/>"#);
}

fn text(svg: &mut String, attributes: &str, [x, y]: [f64; 2], text: &str) {
    let _ = writeln!(svg, r#"<text {attributes} x="{x:.1}" y="{y:.1}">{}</text>"#, escape(text));
}

/// Returns the width of the widest text.
fn widest<'a>(names: impl Iterator<Item = &'a str>) -> f64 {
    LETTER * names.map(|name| name.chars().count()).max().unwrap_or(0) as f64
}

fn dash(curve: &Curve) -> &'static str {
    ["", r#" stroke-dasharray="7 4""#, r#" stroke-dasharray="2 4""#][curve.dashes.min(2)]
}

/// Draws a mark of the look's shape, with a note for the user who points at it.
fn mark(svg: &mut String, look: usize, x: f64, y: f64, note: &str, pale: bool) {
    let (name, shape) = match look % 5 {
        0 => ("circle", format!(r#"cx="{x:.1}" cy="{y:.1}" r="4""#)),
        1 => ("rect", format!(r#"x="{:.1}" y="{:.1}" width="7.4" height="7.4""#, x - 3.7, y - 3.7)),
        2 => ("path", format!(r#"d="M{x:.1} {:.1}l4.8 8.4h-9.6z""#, y - 5.2)),
        3 => ("path", format!(r#"d="M{x:.1} {:.1}l4.8 -8.4h-9.6z""#, y + 5.2)),
        _ => ("path", format!(r#"d="M{x:.1} {:.1}l5.2 5.2l-5.2 5.2l-5.2 -5.2z""#, y - 5.2)),
    };
    let note = if note.is_empty() { String::new() } else { format!("<title>{}</title>", escape(note)) };
    let class = if pale { format!("back s{look}") } else { format!("f{look}") };
    let _ = writeln!(svg, r#"<{name} {shape} class="{class}">{note}</{name}>"#);
}

struct Plane {
    x: Axis,
    y: Axis,
}

impl Plane {
    fn curve(&self, svg: &mut String, curve: &Curve) {
        let look = curve.look % LOOKS.len();
        let at = |p: &Point| format!("{:.1} {:.1}", self.x.at(p.x), self.y.at(p.y));
        let path: Vec<_> = curve.points.iter().map(at).collect();
        let (name, dash) = (escape(&curve.name), dash(curve));
        let _ = writeln!(svg, r#"<g class="series" data-name="{name}">"#);
        let _ = writeln!(svg, r#"<path class="curve s{look}"{dash} d="M{}"/>"#, path.join("L"));
        for point in &curve.points {
            mark(svg, look, self.x.at(point.x), self.y.at(point.y), &point.note, point.pale);
        }
        *svg += "</g>\n";
    }

    /// Draws the band from the least to the most that was measured.
    fn band(&self, svg: &mut String, curve: &Curve) {
        let look = curve.look % LOOKS.len();
        let at = |p: &Point, y: f64| format!("{:.1} {:.1}", self.x.at(p.x), self.y.at(y));
        let spread = curve.points.iter().any(|p| p.high > p.low);
        let highs = curve.points.iter().map(|p| at(p, p.high));
        let path: Vec<_> = highs.chain(curve.points.iter().rev().map(|p| at(p, p.low))).collect();
        if spread {
            let _ = writeln!(svg, r#"<path class="f{look}" fill-opacity=".15" d="M{}z"/>"#, path.join("L"));
        }
    }

    fn level(&self, svg: &mut String, curve: &Curve, width: f64) {
        let Some(point) = curve.points.first() else { return };
        let (look, y, name) = (curve.look % LOOKS.len(), self.y.at(point.y), escape(&curve.name));
        let (note, dash) = (escape(&point.note), dash(curve));
        let _ = writeln!(svg, r#"<g class="series" data-name="{name}"><title>{note}</title>"#);
        let _ = writeln!(svg, r#"<path class="curve s{look}"{dash} d="M{LEFT} {y:.1}h{width}"/></g>"#);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_any_kind_is_escaped() {
        assert_eq!(escape("<a b=\"c\">'&\n\u{0}\u{7}"), "&lt;a b=&quot;c&quot;&gt;&#39;&amp; \u{fffd}\u{fffd}");
    }
}
