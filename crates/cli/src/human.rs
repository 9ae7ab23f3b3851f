// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Formats numbers for people.

use std::time::Duration;

use tombolo_bench::size::in_units;

/// Formats bytes as `1.50 GiB`: powers of 1024, as sizes are given on the command line.
pub fn bytes(n: u64) -> String {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)].map(|(name, bits)| ((1u64 << bits) as f64, name));
    if n < 1024 { format!("{n} B") } else { in_units(n as f64, &units) }
}

/// Formats a rate as `870 MB/s`: powers of 1000, as in the benchmark's tables.
pub fn rate(per_second: f64) -> String {
    in_units(per_second, &[(1.0, "B/s"), (1e3, "kB/s"), (1e6, "MB/s"), (1e9, "GB/s")])
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
    in_units(time.as_secs_f64(), &[(1.0, "s")])
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
