// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shows results to people: a table for each test, a row for each size, a column for each transport.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::job::{Cpu, Mode, Test, Wait};
use crate::line::Placement;
use crate::result::Measurement;
use crate::size;
use crate::transport;

/// Draws all tables. If `against` names a transport, each is followed by how many times better than it the others are.
pub fn render(measurements: &[Measurement], against: Option<&str>) -> String {
    let mut text = String::new();
    for group in groups(measurements) {
        let table = Table::of(&group);
        let cell = |m: &Measurement| {
            let elsewhere = if m.placement == table.placement { "" } else { "*" };
            let dozed = if m.dozed() { "°" } else { "" };
            format!("{}{elsewhere}{dozed}", human(m.median, m.test))
        };
        table.draw(&mut text, &heading(group[0], &table), cell);
        if let Some(yardstick) = against.filter(|name| *name != LIMIT) {
            let Some(column) = table.columns.iter().position(|(name, _)| name == yardstick) else { continue };
            let title = format!("{}: times better than {yardstick}", title(group[0]));
            let ratio = |m: &Measurement, row: &Row| {
                row.get(&column).map_or(String::new(), |other| format!("{:.2}", m.times_better_than(other)))
            };
            table.draw_by_row(&mut text, &title, ratio);
        }
        if let Some(limit) = table.columns.iter().position(|(name, _)| name == LIMIT) {
            let title = format!("{}: share of {LIMIT}, the limit of such a ring here", title(group[0]));
            table.draw_by_row(&mut text, &title, |m, row| row.get(&limit).map_or("-".into(), |limit| share(m, limit)));
        }
    }
    text
}

/// Transport of two pinned processes that copy through a ring with next to no protocol. Every table that has it shows
/// shares of it.
const LIMIT: &str = "raw-copy";

/// Returns the share of the limit that a measurement reached. There is no share where the limit was measured with
/// another ring size or another placement of the CPUs, because the two are then not comparable.
fn share(m: &Measurement, limit: &Measurement) -> String {
    let comparable = m.placement == limit.placement && m.placement != Placement::Mixed;
    match (comparable, m.ring) {
        (false, _) => "void".into(),
        (true, Some(ring)) if Some(ring) != limit.ring => "-".into(),
        _ => format!("{:.2}", m.times_better_than(limit)),
    }
}

/// Groups measurements that answer one question, and so share a table or a chart, in the order in which they come.
pub(crate) fn groups(measurements: &[Measurement]) -> Vec<Vec<&Measurement>> {
    let question = |m: &Measurement| (m.test, m.wait, m.cpu, m.rate, m.think_ns, m.neighbour);
    let mut groups: Vec<Vec<&Measurement>> = Vec::new();
    for m in measurements {
        match groups.iter_mut().find(|group| question(group[0]) == question(m)) {
            Some(group) => group.push(m),
            None => groups.push(vec![m]),
        }
    }
    groups
}

/// Returns the title of a group.
pub(crate) fn title(m: &Measurement) -> String {
    let mut title = match m.test {
        Test::Throughput => "throughput",
        Test::Rate => "message rate",
        Test::Latency => "round trip",
        Test::Load => "delay of messages",
        Test::Switches => "voluntary context switches per GiB",
        Test::Setup => "connections per second",
        Test::Channels => "throughput of many channels at once",
        Test::Cpu => "CPU seconds per GiB",
        Test::Memory => "memory per channel",
    }
    .to_owned();
    title += match m.wait {
        Some(Wait::Spin) => ", spinning",
        Some(Wait::Sleep) => ", sleeping",
        None => "",
    };
    if let Some(rate) = m.rate {
        title += &format!(" at {} a second", grouped(rate.into()));
    }
    if let Some(think) = m.think_ns {
        title += &format!(", {} µs busy before each message", think / 1000);
    }
    if m.neighbour == Some(true) {
        title += ", beside a neighbour that computes";
    }
    title + if m.cpu == Cpu::Same { ", both on one CPU" } else { "" }
}

fn heading(first: &Measurement, table: &Table<'_>) -> String {
    let any = |of: &dyn Fn(&Measurement) -> bool| table.rows.values().flat_map(BTreeMap::values).any(|m| of(m));
    let others = any(&|m| m.placement != table.placement);
    let dozed = any(&|m| m.dozed());
    let placement = match table.placement {
        Placement::Near => "; CPUs near",
        Placement::Core => "; two threads of one core",
        Placement::Far => "; CPUs far apart",
        Placement::Mixed => "; the host moved the CPUs: treat as noise",
        Placement::Same | Placement::Unknown => "",
    };
    let elsewhere = if others { " (* elsewhere)" } else { "" };
    let awake = if dozed { " (° mostly answered before the ends could sleep; see --think)" } else { "" };
    format!("{}{placement}{elsewhere}{awake}", title(first))
}

type Row<'a> = BTreeMap<usize, &'a Measurement>;

struct Table<'a> {
    columns: Vec<(String, Mode)>,
    /// Rows by size and number of channels; cells of a row by column.
    rows: BTreeMap<(usize, usize), Row<'a>>,
    placement: Placement,
}

impl<'a> Table<'a> {
    fn of(group: &[&'a Measurement]) -> Self {
        let fixed = |m: &Measurement| transport::find(&m.transport, m.mode).is_ok_and(|t| t.card().size.is_some());
        let mut table = Self { columns: Vec::new(), rows: BTreeMap::new(), placement: Placement::Mixed };
        let mut counts = BTreeMap::new();
        // Rings of several sizes in one place have a column each.
        let place = |m: &Measurement| (m.transport.clone(), m.mode, m.size, m.channels);
        let twin = |m: &Measurement| group.iter().any(|o| place(o) == place(m) && o.ring != m.ring);
        let split: Vec<_> = group.iter().filter(|m| twin(m)).map(|m| (m.transport.clone(), m.mode)).collect();
        let key = |m: &Measurement| match m.ring {
            Some(ring) if split.contains(&(m.transport.clone(), m.mode)) => {
                (format!("{}, {} ring", m.transport, size::show(ring)), m.mode)
            }
            _ => (m.transport.clone(), m.mode),
        };
        for &m in group {
            let key = key(m);
            if !table.columns.contains(&key) {
                table.columns.push(key);
            }
            let count = counts.entry(format!("{:?}", m.placement)).or_insert((0, m.placement));
            count.0 += 1;
        }
        table.placement = counts.into_values().max_by_key(|(n, _)| *n).map_or(Placement::Mixed, |(_, p)| p);
        let column = |m: &Measurement| table.columns.iter().position(|column| *column == key(m));
        for &m in group.iter().filter(|m| !fixed(m)) {
            if let Some(column) = column(m) {
                table.rows.entry((m.size, m.channels)).or_default().insert(column, m);
            }
        }
        // A transport of only one size is the same yardstick in every row.
        for &m in group.iter().filter(|m| fixed(m)) {
            if table.rows.is_empty() {
                table.rows.insert((m.size, m.channels), Row::new());
            }
            if let Some(column) = column(m) {
                table.rows.values_mut().for_each(|row| _ = row.insert(column, m));
            }
        }
        table
    }

    fn draw(&self, text: &mut String, title: &str, cell: impl Fn(&Measurement) -> String) {
        self.draw_by_row(text, title, |m, _| cell(m));
    }

    fn draw_by_row(&self, text: &mut String, title: &str, cell: impl Fn(&Measurement, &Row<'a>) -> String) {
        let twice = |name: &String| self.columns.iter().filter(|(other, _)| other == name).count() > 1;
        let name = |(name, mode): &(String, Mode)| match mode {
            Mode::Message if twice(name) => format!("{name} (messages)"),
            _ => name.clone(),
        };
        let test = self.rows.values().flat_map(BTreeMap::values).next().map(|m| m.test);
        let label = |&(bytes, channels): &(usize, usize)| match test {
            Some(Test::Channels) => format!("{channels} × {}", size::show(bytes)),
            Some(Test::Setup) => String::new(),
            Some(Test::Memory) => format!("{channels} channels"),
            _ => size::show(bytes),
        };
        let mut lines = vec![std::iter::once(String::new()).chain(self.columns.iter().map(name)).collect::<Vec<_>>()];
        for (key, row) in &self.rows {
            let cells = (0..self.columns.len()).map(|c| row.get(&c).map_or("-".into(), |m| cell(m, row)));
            lines.push(std::iter::once(label(key)).chain(cells).collect());
        }
        let width = |c: usize| lines.iter().map(|line| line[c].chars().count()).max().unwrap_or(0);
        let widths: Vec<_> = (0..=self.columns.len()).map(width).collect();
        let _ = writeln!(text, "\n{title}");
        for line in &lines {
            let padded: Vec<_> = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}")).collect();
            let _ = writeln!(text, "{}", padded.join("  "));
        }
    }
}

/// Formats a large number in groups of three digits.
pub(crate) fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a number with its unit, in three digits.
pub(crate) fn human(value: f64, test: Test) -> String {
    let scaled = |units: &[(f64, &str)]| size::in_units(value, units);
    match test {
        Test::Throughput | Test::Channels => scaled(&[(1e3, "kB/s"), (1e6, "MB/s"), (1e9, "GB/s")]),
        Test::Rate => scaled(&[(1.0, "/s"), (1e3, "k/s"), (1e6, "M/s")]),
        Test::Latency | Test::Load => scaled(&[(1.0, "ns"), (1e3, "µs"), (1e6, "ms")]),
        Test::Setup => scaled(&[(1.0, "/s"), (1e3, "k/s")]),
        Test::Memory => scaled(&[(1024.0, "KiB"), (1048576.0, "MiB")]),
        Test::Switches => format!("{value:.0}"),
        Test::Cpu => format!("{value:.3} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn m(transport: &str, size: usize, median: f64) -> Measurement {
        let json = format!(
            r#"{{"test":"latency","transport":"{transport}","mode":"{}","size":{size},"channels":1,"unit":"ns","median":{median},"min":1,"max":2,"runs":5,"placement":"near","wait":"spin","cpu":"cross"}}"#,
            if transport == "line" { "message" } else { "stream" }
        );
        serde_json::from_str(&json).unwrap()
    }

    #[test]
    fn table_of_two_sizes_repeats_the_line_and_adds_ratios() {
        let text = render(&[m("tcp", 1, 7200.0), m("line", 8, 100.0), m("tcp", 4096, 80_000.0)], Some("line"));
        let want = "
round trip, spinning; CPUs near
          tcp    line
   1  7.20 µs  100 ns
4KiB  80.0 µs  100 ns

round trip, spinning: times better than line
       tcp  line
   1  0.01  1.00
4KiB  0.00  1.00
";
        assert_eq!(text, want);
    }

    #[test]
    fn table_with_the_limit_shows_shares_of_it_where_they_mean_something() {
        let of = |transport: &str, size, median, ring| Measurement {
            test: Test::Throughput,
            wait: None,
            ring,
            ..m(transport, size, median)
        };
        let (ring, other) = (Some(1 << 20), Some(4 << 20));
        let far = Measurement { placement: Placement::Far, ..of("tombolo", 4096, 4e9, ring) };
        let all = [
            of("tombolo", 64, 9e9, ring),
            of("tcp", 64, 1e9, None),
            of("raw-copy", 64, 10e9, ring),
            far,
            of("tcp", 4096, 2e9, None),
            of("raw-copy", 4096, 20e9, ring),
        ];
        let text = render(&all, None);
        let shares = text.split("share of raw-copy").nth(1).expect(&text);
        let rows: Vec<Vec<&str>> = shares.lines().skip(2).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows, [vec!["64", "0.90", "0.10", "1.00"], vec!["4KiB", "void", "0.10", "1.00"]], "{text}");
        assert_eq!(share(&of("tombolo", 64, 1.0, other), &of("raw-copy", 64, 2.0, ring)), "-");
        assert_eq!(render(&all, Some("raw-copy")), text, "it is said once");
        assert!(!render(&all[..2], None).contains("share"));
    }

    #[test]
    fn table_of_sleepers_that_did_not_sleep_says_so() {
        let asleep =
            |voluntary| Measurement { wait: Some(Wait::Sleep), voluntary: Some(voluntary), ..m("tcp", 1, 18_000.0) };
        let (asleep, awake) = (render(&[asleep(2.0)], None), render(&[asleep(0.2)], None));
        assert!(asleep.contains("18.0 µs\n") && !asleep.contains('°'), "{asleep}");
        assert!(awake.contains("18.0 µs°\n") && awake.contains("before the ends could sleep"), "{awake}");
    }

    #[test]
    fn table_of_two_rings_in_one_place_has_a_column_for_each() {
        let ring = |ring, median| Measurement { ring: Some(ring), ..m("tombolo", 1, median) };
        let text = render(&[ring(4096, 100.0), ring(1 << 20, 200.0), m("tcp", 1, 300.0)], None);
        assert!(text.contains("tombolo, 4KiB ring  tombolo, 1MiB ring     tcp\n"), "{text}");
        assert!(text.contains("100 ns") && text.contains("200 ns"), "{text}");
    }

    #[test]
    fn grouped_numbers_of_any_length_have_commas_between_thousands() {
        for (value, text) in [(0.0, "0"), (999.0, "999"), (1000.0, "1,000"), (1234567.4, "1,234,567")] {
            assert_eq!(grouped(value), text);
        }
    }

    #[test]
    fn human_numbers_have_three_digits_and_a_unit() {
        for (value, test, text) in [
            (58.25e9, Test::Throughput, "58.2 GB/s"),
            (14e6, Test::Throughput, "14.0 MB/s"),
            (235e6, Test::Rate, "235 M/s"),
            (84.6, Test::Latency, "84.6 ns"),
            (40_700.0, Test::Latency, "40.7 µs"),
            (0.1234, Test::Cpu, "0.123 s"),
            (65536.0, Test::Memory, "64.0 KiB"),
        ] {
            assert_eq!(human(value, test), text);
        }
    }
}
