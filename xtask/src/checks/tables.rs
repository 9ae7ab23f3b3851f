// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks that the figures in a page's tables are those of recorded runs.
//!
//! A table that is made from a file stands between two marks, `<!-- table KIND SIZE...: FILE -->` and
//! `<!-- /table -->`. `throughput` and `round-trip` have a column for each size in bytes; `gib` has one for each
//! transport.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::report::Report;
use crate::tree::Tree;

const BEGIN: &str = "<!-- table ";
const END: &str = "<!-- /table -->";
/// Transports in the order of rows and columns: name and mode in the results, and name shown to people.
const TRANSPORTS: [(&str, &str, &str); 10] = [
    ("tombolo", "stream", "Tombolo stream"),
    ("tombolo", "message", "Tombolo messages"),
    ("tcp", "stream", "TCP, loopback"),
    ("tcp-veth", "stream", "TCP, two namespaces"),
    ("unix-stream", "stream", "UNIX stream"),
    ("unix-seqpacket", "message", "UNIX seqpacket"),
    ("pipe", "stream", "pipe"),
    ("raw-copy", "stream", "raw copy between two cores"),
    ("memcpy", "message", "memcpy of one core"),
    ("line", "message", "one cache line"),
];

/// Checks that every table with such marks has the values of its file.
pub fn check(tree: &Tree) -> Report {
    let mut report = Report::default();
    let mut tables = 0;
    for (path, text) in tree.files(&[".md"]) {
        match remake(text, tree) {
            Err((line, why)) => report.fail(format!("{path}:{line}: {why}")),
            Ok((new, count)) => {
                tables += count;
                let differs = |(_, (old, new)): &(usize, (&str, &str))| old != new;
                if let Some((row, (old, new))) = text.lines().zip(new.lines()).enumerate().find(differs) {
                    let why = format!("`{old}` where the results say `{new}`; run `cargo xtask table`");
                    report.fail(format!("{path}:{}: {why}", row + 1));
                } else if text != new {
                    report.fail(format!("{path}: a table ends early; run `cargo xtask table`"));
                }
            }
        }
    }
    if tables == 0 && report.passed() {
        report.fail("no page has a table that is made from results: see the head of xtask/src/checks/tables.rs");
    }
    report.summary = format!("{tables} tables made from results");
    report
}

/// Remakes all tables in place. Returns whether all could be made.
pub fn write_all(root: &Path, tree: &Tree) -> Result<bool, String> {
    let mut well = true;
    for (path, text) in tree.files(&[".md"]) {
        match remake(text, tree) {
            Err((line, why)) => {
                println!("{path}:{line}: {why}");
                well = false;
            }
            Ok((new, count)) if count > 0 => {
                fs::write(root.join(path), &new).map_err(|e| format!("{path}: {e}"))?;
                println!("{path}: {count} tables, {}", if new == text { "as before" } else { "written anew" });
            }
            Ok(_) => {}
        }
    }
    Ok(well)
}

/// Returns the page with its tables remade, and the number of tables. If a line is wrong, returns its number and the
/// reason.
fn remake(text: &str, tree: &Tree) -> Result<(String, usize), (usize, String)> {
    let (mut page, mut tables) = (String::with_capacity(text.len()), 0);
    let mut fenced = false;
    let mut lines = text.split_inclusive('\n').enumerate();
    while let Some((row, line)) = lines.next() {
        page += line;
        fenced ^= line.trim_start().starts_with("```");
        let Some(order) = line.strip_prefix(BEGIN).filter(|_| !fenced) else { continue };
        let table = order.trim_end().strip_suffix(" -->").ok_or_else(|| "no end of the mark".to_owned());
        page += &table.and_then(|order| make(order, tree)).map_err(|why| (row + 1, why))?;
        tables += 1;
        match lines.find(|(_, line)| line.trim_end() == END) {
            Some((_, line)) => page += line,
            None => return Err((row + 1, format!("the table has no `{END}`"))),
        }
    }
    Ok((page, tables))
}

/// Returns the table for `KIND SIZE...: FILE`.
fn make(order: &str, tree: &Tree) -> Result<String, String> {
    let (words, file) = order.split_once(": ").ok_or("write `KIND SIZE...: FILE`")?;
    let (kind, sizes) = words.split_once(' ').unwrap_or((words, ""));
    let sizes: Vec<u64> = sizes
        .split_whitespace()
        .map(|size| size.parse().map_err(|_| format!("`{size}` is no size in bytes")))
        .collect::<Result<_, String>>()?;
    let text = tree.files(&[".jsonl"]).find(|(path, _)| *path == file).map(|(_, text)| text);
    let results = Results::read(text.ok_or(format!("there is no {file}"))?).map_err(|why| format!("{file}{why}"))?;
    match kind {
        "throughput" => results.by_size("GB/s", "throughput", &sizes, |m| Some(three(m["median"].as_f64()? / 1e9))),
        "round-trip" => results.by_size("spinning, ns", "latency", &sizes, |m| Some(three(m["median"].as_f64()?))),
        "gib" => results.by_count(),
        _ => Err(format!("there is no table `{kind}`; there are throughput, round-trip, gib")),
    }
}

/// Lines of a file that are results.
struct Results(Vec<Value>);

impl Results {
    fn read(text: &str) -> Result<Self, String> {
        let parse = |(row, line)| serde_json::from_str(line).map_err(|e| format!(":{}: {e}", row + 1));
        let lines = text.lines().enumerate().map(parse).collect::<Result<Vec<Value>, String>>()?;
        Ok(Self(lines.into_iter().filter(|line| line["test"].is_string()).collect()))
    }

    /// Returns the first result that fits.
    fn find(&self, test: &str, transport: (&str, &str), size: Option<u64>) -> Option<&Value> {
        self.0.iter().find(|m| {
            let waits = m["wait"].is_null() || m["wait"] == "spin";
            let is = m["test"] == test && m["transport"] == transport.0 && m["mode"] == transport.1;
            // A transport with a single size stands for all sizes.
            is && waits && m["cpu"] == "cross" && (size.is_none_or(|size| m["size"] == size) || transport.0 == "line")
        })
    }

    /// Returns a table with a row for each transport and a column for each size.
    fn by_size(
        &self,
        corner: &str,
        test: &str,
        sizes: &[u64],
        show: fn(&Value) -> Option<String>,
    ) -> Result<String, String> {
        let head = sizes.iter().map(|size| human_size(*size));
        let mut rows = vec![std::iter::once(corner.to_owned()).chain(head).collect::<Vec<_>>()];
        for (transport, mode, name) in TRANSPORTS {
            let cells: Vec<_> =
                sizes.iter().map(|size| self.find(test, (transport, mode), Some(*size)).and_then(show)).collect();
            if cells.iter().any(Option::is_some) {
                rows.push(
                    std::iter::once(name.to_owned()).chain(cells.into_iter().map(Option::unwrap_or_default)).collect(),
                );
            }
        }
        table(&rows)
    }

    /// Returns a table of the kernel's work for one GiB, with a column for each transport.
    fn by_count(&self) -> Result<String, String> {
        let there = |(transport, mode, name)| Some((self.find("switches", (transport, mode), None)?, name));
        let found: Vec<(&Value, &str)> = TRANSPORTS.into_iter().filter_map(there).collect();
        let size = found.first().and_then(|(m, _)| m["size"].as_u64()).unwrap_or(0);
        let corner = format!("1 GiB in writes of {}", human_size(size));
        let mut rows = vec![std::iter::once(corner).chain(found.iter().map(|(_, name)| (*name).into())).collect()];
        for (name, field) in
            [("context switches", "voluntary"), ("system calls", "syscalls"), ("notifications", "notifications")]
        {
            let cells = found.iter().map(|(m, _)| m[field].as_f64().map_or(String::new(), count));
            rows.push(std::iter::once(name.to_owned()).chain(cells).collect());
        }
        table(&rows)
    }
}

/// Formats rows as Markdown, the first as the head.
fn table(rows: &[Vec<String>]) -> Result<String, String> {
    if rows.len() < 2 || rows[0].len() < 2 {
        return Err("the file has no such results".into());
    }
    let mut text = String::new();
    for (i, row) in rows.iter().enumerate() {
        text += &format!("| {} |\n", row.join(" | "));
        if i == 0 {
            text += &format!("|---|{}\n", "--:|".repeat(row.len() - 1));
        }
    }
    Ok(text)
}

/// Formats a value with three digits, or with two if it is below 1.
fn three(value: f64) -> String {
    let digits = match value {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        v if v >= 0.0995 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    if digits == 0 { count(value) } else { text }
}

/// Formats a whole number in groups of three digits.
fn count(value: f64) -> String {
    let digits = format!("{value:.0}");
    let group = |(i, digit)| if i > 0 && (digits.len() - i) % 3 == 0 { vec![',', digit] } else { vec![digit] };
    digits.chars().enumerate().flat_map(group).collect()
}

fn human_size(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: &str = r#"{"about":{"cpu":"x"}}
{"test":"throughput","transport":"tcp","mode":"stream","size":64,"median":81998600.0,"cpu":"cross"}
{"test":"throughput","transport":"tombolo","mode":"stream","size":64,"median":12907900000.0,"cpu":"cross"}
{"test":"throughput","transport":"tombolo","mode":"stream","size":1024,"median":49599400000.0,"cpu":"cross"}
{"test":"latency","transport":"tombolo","mode":"stream","size":64,"median":47349.7,"wait":"sleep","cpu":"cross"}
{"test":"latency","transport":"tombolo","mode":"stream","size":64,"median":116.448,"wait":"spin","cpu":"cross"}
{"test":"latency","transport":"line","mode":"message","size":8,"median":100.1,"wait":"spin","cpu":"cross"}
{"test":"switches","transport":"tombolo","mode":"stream","size":32768,"median":1,"cpu":"cross","voluntary":1.0,"syscalls":5.0,"notifications":2.0}
{"test":"switches","transport":"tcp","mode":"stream","size":32768,"median":6898.5,"cpu":"cross","voluntary":6898.5,"syscalls":52507.5}
"#;
    const TABLE: &str =
        "| GB/s | 64 B | 1 KiB |\n|---|--:|--:|\n| Tombolo stream | 12.9 | 49.6 |\n| TCP, loopback | 0.082 |  |\n";

    fn page(table: &str) -> String {
        format!("a\n<!-- table throughput 64 1024: d/x.jsonl -->\n{table}{END}\nb\n")
    }

    fn check_page(page: &str) -> Report {
        check(&Tree::of(&[("README.md", page), ("d/x.jsonl", DATA)]))
    }

    #[test]
    fn table_as_the_results_say_passes() {
        check_page(&page(TABLE)).assert_passed();
    }

    #[test]
    fn tables_of_other_kinds_are_made() {
        let tree = Tree::of(&[("d/x.jsonl", DATA)]);
        assert_eq!(
            make("round-trip 64: d/x.jsonl", &tree).unwrap(),
            "| spinning, ns | 64 B |\n|---|--:|\n| Tombolo stream | 116 |\n| one cache line | 100 |\n"
        );
        assert_eq!(
            make("gib: d/x.jsonl", &tree).unwrap(),
            "| 1 GiB in writes of 32 KiB | Tombolo stream | TCP, loopback |\n|---|--:|--:|\n| context switches | 1 | 6,898 |\n\
             | system calls | 5 | 52,508 |\n| notifications | 2 |  |\n"
        );
    }

    #[test]
    fn mark_in_a_code_block_is_text() {
        let text = format!("```md\n<!-- table nonsense -->\n```\n{}", page(TABLE));
        check_page(&text).assert_passed();
    }

    #[test]
    fn canary_figure_that_was_improved_by_hand_fails() {
        check_page(&page(&TABLE.replace("12.9", "13.9"))).assert_only_failure("README.md:5: `| Tombolo stream | 13.9");
    }

    #[test]
    fn canary_row_that_is_missing_or_too_many_fails() {
        check_page(&page("")).assert_only_failure("where the results say");
        check_page(&page(&format!("{TABLE}| iceoryx2 | 1 | 2 |\n"))).assert_only_failure("where the results say");
    }

    #[test]
    fn canary_mark_that_makes_no_table_fails() {
        check_page(&page(TABLE).replace("d/x", "d/y")).assert_only_failure("there is no d/y.jsonl");
        check_page(&page(TABLE).replace("throughput", "speed")).assert_only_failure("there is no table `speed`");
        check_page(&page(TABLE).replace(END, "")).assert_only_failure("README.md:2: the table has no");
        check_page(&page(TABLE).replace("64 1024", "7")).assert_only_failure("has no such results");
        check_page(&page(TABLE).replace("64 1024", "64 1KiB")).assert_only_failure("`1KiB` is no size");
    }

    #[test]
    fn canary_page_without_a_table_fails() {
        check_page("nothing").assert_only_failure("no page has a table");
    }
}
