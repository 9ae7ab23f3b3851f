// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Formats numbers for people.

use std::time::Duration;

/// Formats bytes as `1.50 GiB`: powers of 1024, as sizes are given on the command line.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let step = (0..UNITS.len() - 1).find(|&step| n >> (10 * (step + 1)) == 0).unwrap_or(UNITS.len() - 1);
    if step == 0 { format!("{n} B") } else { three_digits(n as f64 / (1u64 << (10 * step)) as f64, UNITS[step]) }
}

/// Formats a rate as `870 MB/s`: powers of 1000, as in the benchmark's tables.
pub fn rate(per_second: f64) -> String {
    const UNITS: [&str; 4] = ["B/s", "kB/s", "MB/s", "GB/s"];
    let step = (0..UNITS.len() - 1).find(|&step| per_second < 1000f64.powi(step as i32 + 1)).unwrap_or(UNITS.len() - 1);
    three_digits(per_second / 1000f64.powi(step as i32), UNITS[step])
}

/// Formats a time as `1:02:03`, or `2:03`.
pub fn clock(time: Duration) -> String {
    let s = time.as_secs();
    match s / 3600 {
        0 => format!("{}:{:02}", s / 60, s % 60),
        hours => format!("{hours}:{:02}:{:02}", s / 60 % 60, s % 60),
    }
}

/// Formats a time as `1.23 s`.
pub fn seconds(time: Duration) -> String {
    three_digits(time.as_secs_f64(), "s")
}

/// Returns the rows, which have equally many cells, as lines with aligned columns.
pub fn aligned(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.first().map_or(0, Vec::len);
    let widths: Vec<usize> =
        (0..columns).map(|at| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let padded = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

fn three_digits(value: f64, unit: &str) -> String {
    let digits = match value {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_rates_and_times_are_short() {
        for (n, text) in
            [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (1 << 30, "1.00 GiB"), (u64::MAX, "16777216 TiB")]
        {
            assert_eq!(bytes(n), text);
        }
        for (per_second, text) in [(0.0, "0.00 B/s"), (999.0, "999 B/s"), (1.25e9, "1.25 GB/s"), (5e13, "50000 GB/s")] {
            assert_eq!(rate(per_second), text);
        }
        assert_eq!(clock(Duration::from_secs(3)), "0:03");
        assert_eq!(clock(Duration::from_secs(3723)), "1:02:03");
    }
}
