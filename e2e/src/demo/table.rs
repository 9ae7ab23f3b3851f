// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tombolo beside TCP, from the lines of `tombolo bench --json`.

use serde_json::Value;
use std::fmt::{self, Display, Formatter};
use tombolo_e2e::error::Result;

/// A question and the two answers.
#[derive(Debug, PartialEq)]
struct Row {
    question: String,
    /// Median, least and most.
    ours: [f64; 3],
    theirs: [f64; 3],
    unit: Unit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    /// Bytes a second: more is better.
    Rate,
    /// Nanoseconds: less is better.
    Time,
}

/// What was measured between two places.
#[derive(Debug)]
pub struct Table {
    title: String,
    rows: Vec<Row>,
}

impl Table {
    /// Puts the lines together: streams beside TCP's better setting.
    ///
    /// # Errors
    /// A line is none of a measurement.
    pub fn of(title: &str, lines: &[String]) -> Result<Self> {
        let mut rows: Vec<Row> = Vec::new();
        let values = lines.iter().map(|line| serde_json::from_str(line)).collect::<serde_json::Result<Vec<Value>>>()?;
        let of = |transport: &'static str| {
            values.iter().filter(move |line| line["transport"] == transport && line["mode"] == "stream")
        };
        for ours in of("tombolo") {
            let same = |line: &&Value| ["test", "size", "wait"].iter().all(|key| line[key] == ours[key]);
            let Some(theirs) = of("tcp").find(same) else { continue };
            let numbers = |line: &Value| ["median", "min", "max"].map(|key| line[key].as_f64().unwrap_or(f64::NAN));
            let size = size(ours["size"].as_u64().unwrap_or(0));
            let (question, unit) = match ours["wait"].as_str() {
                Some("spin") => (format!("round trip of {size}, spinning"), Unit::Time),
                Some(_) => (format!("round trip of {size}, sleeping"), Unit::Time),
                None => (format!("throughput, {size}"), Unit::Rate),
            };
            rows.push(Row { question, ours: numbers(ours), theirs: numbers(theirs), unit });
        }
        Ok(Self { title: title.to_owned(), rows })
    }
}

fn size(bytes: u64) -> String {
    if bytes % 1024 == 0 { format!("{} KiB", bytes / 1024) } else { format!("{bytes} B") }
}

impl Row {
    /// How many times better than TCP.
    fn ratio(&self) -> f64 {
        match self.unit {
            Unit::Rate => self.ours[0] / self.theirs[0],
            Unit::Time => self.theirs[0] / self.ours[0],
        }
    }
}

/// Three digits, with the unit.
fn show(value: f64, unit: Unit) -> String {
    let (scale, name) = match unit {
        Unit::Rate if value >= 1e9 => (1e9, "GB/s"),
        Unit::Rate => (1e6, "MB/s"),
        Unit::Time if value >= 1e6 => (1e6, "ms"),
        Unit::Time => (1e3, "µs"),
    };
    let value = value / scale;
    let digits = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {name}")
}

impl Display for Table {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<30} {:>30} {:>30} {:>9}", self.title, "Tombolo (least to most)", "TCP, virtio-net", "times")?;
        for row in &self.rows {
            let cell = |[median, least, most]: [f64; 3]| {
                format!("{} ({} to {})", show(median, row.unit), show(least, row.unit), show(most, row.unit))
            };
            writeln!(f, "{:<30} {:>30} {:>30} {:>9.1}", row.question, cell(row.ours), cell(row.theirs), row.ratio())?;
        }
        Ok(())
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
        let table = Table::of("a to b", &lines.map(str::to_owned)).unwrap();
        let ratios: Vec<f64> = table.rows.iter().map(Row::ratio).collect();
        assert_eq!(ratios, [8.0, 200.0]);
        assert_eq!(table.rows[1].question, "round trip of 1 B, spinning");
        assert!(table.to_string().contains("800 MB/s"), "{table}");
    }
}
