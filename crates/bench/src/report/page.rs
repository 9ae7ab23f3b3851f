// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes one page that needs no other file.

use std::fmt::Write;

use super::figures::{Figure, name_of, size_of};
use super::record::Records;
use super::svg::{escape, style};
use crate::job::{Cpu, Mode, Test, Wait};
use crate::line::Placement;
use crate::result::Measurement;
use crate::table::{self, grouped};

const STYLE: &str = "
:root{color-scheme:light dark;--text:#24292f;--soft:#5c6570;--line:#dfe3e8;--back:#fff;--tint:#f6f8fa;--own:#0b5fd0}
@media (prefers-color-scheme:dark){:root{--text:#e3e6ea;--soft:#a4acb6;--line:#333941;--back:#14171b;--tint:#1c2025;--own:#62adff}}
body{margin:0;background:var(--back);color:var(--text);font:16px/1.5 system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}
main{max-width:1040px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:28px;margin:0 0 4px}h2{font-size:20px;margin:44px 0 8px}p{margin:8px 0}
.soft,figcaption,dt{color:var(--soft)}figure{margin:28px 0 0}figcaption{font-size:14px;margin:2px 10px}
.chart{display:block;width:100%;height:auto}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;font-size:14px;margin:12px 0}dd{margin:0;overflow-wrap:anywhere}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:4px 9px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600;vertical-align:bottom}th:first-child,td:first-child{text-align:left}
tr.own td{background:var(--tint);font-weight:600}tr.own td:first-child{color:var(--own)}
.glance th{white-space:normal}details{margin:6px 10px;font-size:14px}summary{cursor:pointer;color:var(--soft)}
code{font-size:13px}li{margin:2px 0}
";

/// Returns the report as a page: the subject, the machine, the tables, the charts, the skipped measurements.
pub fn page(records: &Records, figures: &[Figure<'_>]) -> String {
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Tombolo, measured</title>\n<style>{STYLE}{}</style>\n</head>\n<body>\n<main>\n",
        style()
    );
    html += "<h1>Tombolo, measured</h1>\n<p class=\"soft\">Ways of moving bytes between two processes, side by side in one \
             run.</p>\n";
    for about in &records.about {
        html += "<dl>\n";
        for (name, value) in about.lines() {
            let value = if name == "command" { format!("<code>{}</code>", escape(&value)) } else { escape(&value) };
            let _ = writeln!(html, "<dt>{name}</dt><dd>{value}</dd>");
        }
        html += "</dl>\n";
    }
    for note in &records.notes {
        let _ = writeln!(html, "<p>{}</p>", escape(note));
    }
    write_overview(&mut html, &records.measurements);
    html += "<h2>Charts</h2>\n<p>Marks are medians; bands and whiskers reach from the least to the most of the samples that \
             count. Compare within a chart, and filled marks only: a hollow mark or a pale bar was taken while the CPUs \
             were elsewhere than for the others. Point at a mark for its \
             figures.</p>\n";
    for figure in figures {
        let Figure { name, svg, caption, .. } = figure;
        let placement = placement(&figure.results);
        let _ = writeln!(html, "<figure id=\"{name}\">\n{svg}<figcaption>{}{placement}</figcaption>", escape(caption));
        if !figure.results.is_empty() {
            numbers(&mut html, &figure.results);
        }
        html += "</figure>\n";
    }
    if !records.skips.is_empty() {
        html += "<h2>Not measured</h2>\n<ul>\n";
        for skip in &records.skips {
            let _ = writeln!(html, "<li>{}</li>", escape(&skip.to_string()));
        }
        html += "</ul>\n";
    }
    html + "</main>\n</body>\n</html>\n"
}

/// Describes the placements of the CPUs, as a sentence.
fn placement(results: &[&Measurement]) -> String {
    let of = |wanted: Placement| results.iter().filter(|m| m.placement == wanted).count();
    let counts = [
        (of(Placement::Near), "with near CPUs"),
        (of(Placement::Core), "on two threads of one core"),
        (of(Placement::Far), "with CPUs far apart"),
        (of(Placement::Mixed), "while the host moved a CPU"),
        (of(Placement::Same), "on one CPU"),
    ];
    let parts: Vec<_> = counts.iter().filter(|(n, _)| *n > 0).map(|(n, place)| format!("{n} {place}")).collect();
    match (parts.as_slice(), counts.iter().find(|(n, _)| *n > 0)) {
        ([_], Some((_, place))) => format!(" All {place}."),
        ([], _) | (_, None) => String::new(),
        _ => format!(" Of {} results, {}.", results.len(), parts.join(", ")),
    }
}

/// A column of the first table: its heading, and the result that it shows.
struct Column {
    heading: &'static str,
    test: Test,
    fits: fn(&Measurement) -> bool,
    value: fn(&Measurement) -> Option<String>,
}

const fn median(heading: &'static str, test: Test, fits: fn(&Measurement) -> bool) -> Column {
    Column { heading, test, fits, value: |m| Some(table::human(m.median, m.test)) }
}

const COLUMNS: [Column; 10] = [
    median("throughput, 64\u{a0}B", Test::Throughput, |m| m.size == 64),
    median("throughput, 16\u{a0}KiB", Test::Throughput, |m| m.size == 16 << 10),
    median("throughput, 1\u{a0}MiB", Test::Throughput, |m| m.size == 1 << 20),
    median("round trip, 64\u{a0}B, spinning", Test::Latency, |m| {
        matches!(m.size, 64 | 8) && m.wait == Some(Wait::Spin) && m.cpu == Cpu::Cross
    }),
    median("round trip, 64\u{a0}B, sleeping", Test::Latency, |m| {
        matches!(m.size, 64 | 8) && m.wait == Some(Wait::Sleep) && m.cpu == Cpu::Cross && m.neighbour.is_none()
    }),
    Column {
        heading: "delay of 99 % at 10,000/s",
        test: Test::Load,
        fits: |m| m.rate == Some(10_000),
        value: |m| m.p99.map(|p99| table::human(p99, m.test)),
    },
    median("CPU time per GiB", Test::Cpu, |_| true),
    Column {
        heading: "system calls per GiB",
        test: Test::Switches,
        fits: |_| true,
        value: |m| m.syscalls.map(grouped),
    },
    Column {
        heading: "context switches per GiB",
        test: Test::Switches,
        fits: |_| true,
        value: |m| Some(grouped(m.median)),
    },
    median("connections", Test::Setup, |_| true),
];

/// Adds the overview: a table with a row for each transport.
fn write_overview(html: &mut String, measurements: &[Measurement]) {
    let mut transports: Vec<(&str, Mode)> = Vec::new();
    for m in measurements {
        if !transports.contains(&(&m.transport, m.mode)) {
            transports.push((&m.transport, m.mode));
        }
    }
    let cell = |column: &Column, (transport, mode): (&str, Mode)| {
        let is = |m: &&Measurement| m.transport == transport && m.mode == mode && m.test == column.test;
        measurements.iter().filter(is).find(|m| (column.fits)(m)).and_then(column.value)
    };
    let columns: Vec<_> = COLUMNS.iter().filter(|c| transports.iter().any(|&t| cell(c, t).is_some())).collect();
    if columns.is_empty() {
        return;
    }
    *html += "<h2>At a glance</h2>\n<div class=\"wide\"><table class=\"glance\">\n<tr><th></th>";
    for column in &columns {
        let _ = write!(html, "<th>{}</th>", column.heading);
    }
    *html += "</tr>\n";
    for transport in transports {
        let cells: Vec<_> = columns.iter().map(|column| cell(column, transport)).collect();
        if cells.iter().all(Option::is_none) {
            continue;
        }
        let own = if transport.0 == "tombolo" { " class=\"own\"" } else { "" };
        let _ = write!(html, "<tr{own}><td>{}</td>", escape(&name_of(transport.0, transport.1)));
        for cell in cells {
            let _ = write!(html, "<td>{}</td>", cell.unwrap_or_default());
        }
        *html += "</tr>\n";
    }
    *html += "</table></div>\n";
}

/// A heading, and a function for its cells, which returns `None` where there is no value.
type Detail = (&'static str, fn(&Measurement) -> Option<String>);

/// Adds all figures behind a chart.
fn numbers(html: &mut String, results: &[&Measurement]) {
    let details: [Detail; 18] = [
        ("transport", |m| Some(escape(&name_of(&m.transport, m.mode)))),
        ("size", |m| (!matches!(m.test, Test::Setup | Test::Memory)).then(|| size_of(m.size))),
        ("channels", |m| (m.channels > 1).then(|| m.channels.to_string())),
        ("median", |m| Some(table::human(m.median, m.test))),
        ("least", |m| Some(table::human(m.min, m.test))),
        ("most", |m| Some(table::human(m.max, m.test))),
        ("runs", |m| Some(m.runs.to_string())),
        ("placement", |m| Some(format!("{:?}", m.placement).to_lowercase())),
        ("50 %", |m| Some(table::human(m.p50?, m.test))),
        ("90 %", |m| Some(table::human(m.p90?, m.test))),
        ("99 %", |m| Some(table::human(m.p99?, m.test))),
        ("99.9 %", |m| Some(table::human(m.p999?, m.test))),
        ("system calls", |m| count(m.syscalls?)),
        ("notifications", |m| count(m.notifications?)),
        ("switches", |m| count(m.voluntary?)),
        ("least, most of a fair share", |m| Some(format!("{:.2}, {:.2}", m.share_min?, m.share_max?))),
        ("ring", |m| m.ring.map(size_of)),
        ("variant", |m| m.variant.as_deref().map(escape)),
    ];
    let shown: Vec<_> = details.iter().filter(|(_, cell)| results.iter().any(|m| cell(m).is_some())).collect();
    *html += "<details><summary>Numbers</summary><div class=\"wide\"><table>\n<tr>";
    for (heading, _) in &shown {
        let _ = write!(html, "<th>{heading}</th>");
    }
    *html += "</tr>\n";
    for m in results {
        let own = if m.transport == "tombolo" { " class=\"own\"" } else { "" };
        let _ = write!(html, "<tr{own}>");
        for (_, cell) in &shown {
            let _ = write!(html, "<td>{}</td>", cell(m).unwrap_or_default());
        }
        *html += "</tr>\n";
    }
    *html += "</table></div></details>\n";
}

/// Formats a count, with decimals if it is small.
fn count(value: f64) -> Option<String> {
    Some(if value != 0.0 && value < 100.0 { format!("{value:.2}") } else { grouped(value) })
}
