// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compares Tombolo with TCP, from the lines of `tombolo bench --json`.

use super::goals::{Goal, Goals};
use serde_json::Value;
use tombolo_e2e::error::Result;

/// Two places, and the goals for the ratio to TCP between them: of a throughput by the size of a write, of a round trip
/// by the way in which an endpoint waits.
#[derive(Debug)]
pub struct Pair {
    pub title: &'static str,
    throughput: fn(u64) -> Option<f64>,
    round_trip: fn(&str) -> Option<f64>,
}

/// Goals between two machines.
pub const BETWEEN: Pair = Pair {
    title: "a to b",
    throughput: |size| Some(if size <= 4 << 10 { 8.0 } else { 6.0 }),
    round_trip: |wait| Some(if wait == "spin" { 200.0 } else { 4.0 }),
};
/// Goals from a machine to its host.
pub const TO_HOST: Pair =
    Pair { title: "a to its host", throughput: |size| (size == 16 << 10).then_some(4.2), round_trip: |_| None };

/// A question and the two answers.
#[derive(Debug, PartialEq)]
pub struct Row {
    pub question: String,
    /// Median, least and most.
    pub ours: [f64; 3],
    pub theirs: [f64; 3],
    pub unit: Unit,
    pub goal: Option<Goal>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes per second: more is better.
    Rate,
    /// Requests per second: more is better.
    Requests,
    /// Nanoseconds: less is better.
    Time,
}

/// The measurements between two places.
#[derive(Debug)]
pub struct Table {
    pub title: &'static str,
    pub rows: Vec<Row>,
}

impl Table {
    /// Builds the table from the lines. Compares streams with TCP's better setting.
    ///
    /// # Errors
    /// A line is not one of a measurement.
    pub fn of(pair: &Pair, lines: &[String]) -> Result<Self> {
        let mut rows: Vec<Row> = Vec::new();
        let values = lines.iter().map(|line| serde_json::from_str(line)).collect::<serde_json::Result<Vec<Value>>>()?;
        let of = |transport: &'static str| {
            values.iter().filter(move |line| line["transport"] == transport && line["mode"] == "stream")
        };
        for ours in of("tombolo") {
            let same = |line: &&Value| ["test", "size", "wait"].iter().all(|key| line[key] == ours[key]);
            let Some(theirs) = of("tcp").find(same) else { continue };
            let numbers = |line: &Value| ["median", "min", "max"].map(|key| line[key].as_f64().unwrap_or(f64::NAN));
            let bytes = ours["size"].as_u64().unwrap_or(0);
            let size = size(bytes);
            let (question, unit, goal) = match ours["wait"].as_str() {
                Some("spin") => (format!("round trip of {size}, spinning"), Unit::Time, (pair.round_trip)("spin")),
                Some(wait) => (format!("round trip of {size}, sleeping"), Unit::Time, (pair.round_trip)(wait)),
                None => (format!("throughput, {size}"), Unit::Rate, (pair.throughput)(bytes)),
            };
            let goal = goal.map(Goal::Least);
            rows.push(Row { question, ours: numbers(ours), theirs: numbers(theirs), unit, goal });
        }
        Ok(Self { title: pair.title, rows })
    }

    /// Returns the table's text, with the goals beside the figures.
    #[must_use]
    pub fn show(&self, goals: &mut Goals) -> String {
        let title = self.title;
        let mut text =
            format!("{title:<30} {:>30} {:>30} {:>9}\n", "Tombolo (least to most)", "TCP, virtio-net", "times");
        for row in &self.rows {
            let cell = |[median, least, most]: [f64; 3]| {
                format!("{} ({} to {})", show(median, row.unit), show(least, row.unit), show(most, row.unit))
            };
            let (question, ratio) = (&row.question, row.ratio());
            let goal = goals.beside(&format!("{title}, {question}"), ratio, row.goal);
            text += &format!(
                "{question:<30} {:>30} {:>30} {ratio:>9.*}  {goal}\n",
                cell(row.ours),
                cell(row.theirs),
                digits(ratio)
            );
        }
        text
    }
}

/// Returns the median, the least and the most.
pub fn spread(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    let at = |place: usize| values.get(place).copied().unwrap_or(f64::NAN);
    [at(values.len() / 2), at(0), at(values.len().saturating_sub(1))]
}

fn size(bytes: u64) -> String {
    if bytes % 1024 == 0 { format!("{} KiB", bytes / 1024) } else { format!("{bytes} B") }
}

impl Row {
    /// Returns how many times better than TCP the figure is.
    fn ratio(&self) -> f64 {
        match self.unit {
            Unit::Rate | Unit::Requests => self.ours[0] / self.theirs[0],
            Unit::Time => self.theirs[0] / self.ours[0],
        }
    }
}

/// Formats a value with three digits and the unit.
fn show(value: f64, unit: Unit) -> String {
    let (scale, name) = match unit {
        Unit::Rate if value >= 1e9 => (1e9, "GB/s"),
        Unit::Rate => (1e6, "MB/s"),
        Unit::Requests => (1e3, "k/s"),
        Unit::Time if value >= 1e6 => (1e6, "ms"),
        Unit::Time => (1e3, "µs"),
    };
    let value = value / scale;
    format!("{value:.*} {name}", digits(value))
}

/// Returns the number of decimal places for three digits in all.
fn digits(value: f64) -> usize {
    if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_streams_only_and_ratios_say_how_much_better() {
        let lines = [
            r#"{"test":"throughput","transport":"tombolo","mode":"stream","size":64,"median":8e8,"min":7e8,"max":9e8}"#,
            r#"{"test":"throughput","transport":"tombolo","mode":"message","size":64,"median":1,"min":1,"max":1}"#,
            r#"{"test":"throughput","transport":"tcp","mode":"stream","size":64,"median":1e8,"min":1e8,"max":1e8}"#,
            r#"{"test":"latency","transport":"tombolo","mode":"stream","size":1,"wait":"spin","median":500,"min":1,"max":1}"#,
            r#"{"test":"latency","transport":"tcp","mode":"stream","size":1,"wait":"spin","median":1e5,"min":1,"max":1}"#,
            r#"{"test":"latency","transport":"tcp","mode":"stream","size":1,"wait":"sleep","median":2,"min":1,"max":1}"#,
        ];
        let table = Table::of(&BETWEEN, &lines.map(str::to_owned)).unwrap();
        let ratios: Vec<f64> = table.rows.iter().map(Row::ratio).collect();
        assert_eq!(ratios, [8.0, 200.0]);
        assert_eq!(table.rows[1].question, "round trip of 1 B, spinning");
        let mut goals = Goals::default();
        let text = table.show(&mut goals);
        assert!(text.contains("800 MB/s") && text.matches(": met").count() == 2, "{text}");
        assert!(
            goals.to_string().contains("2 figures were measured") && goals.to_string().contains("2 meet it"),
            "{goals}"
        );
        let worse = lines.map(|line| line.replace("1e8", "2e8").replace("1e5", "1e4"));
        let text = Table::of(&BETWEEN, &worse).unwrap().show(&mut goals);
        assert_eq!(text.matches(": not here").count(), 2, "{text}");
    }
}
