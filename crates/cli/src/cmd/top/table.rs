// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lays out the screen: rows, their order, the part of them that is visible.

use std::time::Duration;

use clap::ValueEnum;
use tombolo_bench::size;
use tombolo_inspect::{Channel, Endpoint, Pipe};

use super::{Look, rates::Rates, screen::Key};
use crate::{cmd::ls, human};

/// What to sort by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Sort {
    /// Bytes for each second
    Rate,
    /// Messages or calls for each second
    Calls,
    /// How full the ring is
    Fill,
    /// Sleeps for each second
    Sleeps,
    /// Notifications sent for each second
    Sent,
    /// Notifications that were not needed, for each second
    Unneeded,
    /// Spins that paid, for each second
    Spins,
    /// Youngest last
    Age,
    /// The channel's number
    Id,
}

impl Sort {
    fn of_key(key: char) -> Option<Self> {
        Some(match key {
            'r' => Self::Rate,
            'c' => Self::Calls,
            'f' => Self::Fill,
            's' => Self::Sleeps,
            'n' => Self::Sent,
            'u' => Self::Unneeded,
            'p' => Self::Spins,
            'a' => Self::Age,
            'i' => Self::Id,
            _ => return None,
        })
    }
}

/// Columns: their headers, their widths, and the keys that sort by them. The address has the remaining width.
const COLUMNS: [(&str, usize, Option<Sort>); 10] = [
    ("PIPE", 15, Some(Sort::Id)),
    ("STATE", 11, None),
    ("RATE", 9, Some(Sort::Rate)),
    ("CALLS/s", 7, Some(Sort::Calls)),
    ("FILL", 5, Some(Sort::Fill)),
    ("SLEEP/s", 7, Some(Sort::Sleeps)),
    ("SENT/s", 6, Some(Sort::Sent)),
    ("UNNEED", 6, Some(Sort::Unneeded)),
    ("SPIN/s", 6, Some(Sort::Spins)),
    ("RING", 20, None),
];
/// Index of the first column of numbers, which stand at the right of their columns.
const NUMBERS: usize = 2;
const LAST: &str = "AGE      ADDRESS";
const KEYS: &str = "q quit  sort: r rate  c calls  f fill  s sleeps  n sent  u unneeded  p spins  a age  i id";

/// Lists TCP connections under `tombolo run`, the busiest first.
fn sockets(look: &Look) -> Vec<String> {
    let mut all: Vec<_> = look.sockets.iter().map(|(socket, rates)| (socket, rates.unwrap_or_default())).collect();
    all.sort_by(|(_, a), (_, b)| (b.shared + b.tcp).total_cmp(&(a.shared + a.tcp)));
    let rows = all.iter().map(|(socket, rates)| {
        let (shared, tcp) = (human::rate(rates.shared), human::rate(rates.tcp));
        let (who, how) = (format!("{} {}", socket.pid, socket.command), ls::carried(socket));
        format!("{who:<23} {shared:>12} {tcp:>12} {} - {}  {how}", socket.own, socket.peer)
    });
    let header = format!("{:<23} {:>12} {:>12} CONNECTION", "PROGRAM", "SHARED", "TCP");
    if all.is_empty() { Vec::new() } else { [header].into_iter().chain(rows).collect() }
}

/// Order and scroll position of the rows.
#[derive(Debug)]
pub struct Table {
    sort: Sort,
    reverse: bool,
    scrolled: usize,
    /// Number of rows in all, and of those visible at once.
    rows: usize,
    page: usize,
}

/// One direction of a channel.
struct Row<'a> {
    channel: &'a Channel,
    pipe: usize,
    rates: Option<Rates>,
}

impl Table {
    pub fn new(sort: Sort, reverse: bool) -> Self {
        Self { sort, reverse, scrolled: 0, rows: 0, page: 0 }
    }

    /// Acts on a key. Returns `false` if the program must end.
    pub fn press(&mut self, key: Key) -> bool {
        let last = self.rows.saturating_sub(self.page);
        match key {
            Key::Char('q') => return false,
            Key::Char('j') | Key::Down => self.scrolled = (self.scrolled + 1).min(last),
            Key::Char('k') | Key::Up => self.scrolled = self.scrolled.saturating_sub(1),
            Key::PageDown => self.scrolled = (self.scrolled + self.page).min(last),
            Key::PageUp => self.scrolled = self.scrolled.saturating_sub(self.page),
            Key::Char(key) => match Sort::of_key(key) {
                Some(sort) if sort == self.sort => self.reverse = !self.reverse,
                Some(sort) => (self.sort, self.reverse, self.scrolled) = (sort, false, 0),
                None => {}
            },
        }
        true
    }

    /// Returns the whole screen: totals, header, as many rows as fit, the keys.
    pub fn frame(&mut self, look: &Look, width: usize, height: usize) -> Vec<String> {
        let mut lines = self.lines(look, width);
        self.rows = lines.len() - 2;
        self.page = height.saturating_sub(3);
        self.scrolled = self.scrolled.min(self.rows.saturating_sub(self.page));
        let rows = lines.split_off(2);
        lines.extend(rows.into_iter().skip(self.scrolled).take(self.page));
        lines.resize(height.saturating_sub(1), String::new());
        lines.push(KEYS.into());
        lines.truncate(height);
        lines.iter().map(|line| line.chars().take(width).collect()).collect()
    }

    /// Returns totals, header and all rows.
    pub fn lines(&self, look: &Look, width: usize) -> Vec<String> {
        let mut rows: Vec<Row<'_>> = look
            .channels
            .iter()
            .flat_map(|(channel, rates)| {
                [0, 1].map(|pipe| Row { channel, pipe, rates: rates.as_ref().map(|rates| rates[pipe]) })
            })
            .collect();
        // Stable, and by number where all else is equal, so that rows keep their places.
        rows.sort_by_key(|row| (row.channel.id, row.pipe));
        rows.sort_by(|a, b| b.key(self.sort).total_cmp(&a.key(self.sort)));
        if self.reverse {
            rows.reverse();
        }
        let total: f64 = rows.iter().filter_map(|row| row.rates).map(|rates| rates.bytes).fold(0.0, |a, b| a + b);
        let memory = look.channels.iter().map(|(channel, _)| channel.memory).fold(0, u64::saturating_add);
        let (channels, memory, total) = (look.channels.len(), human::bytes(memory), human::rate(total));
        let remarks = ls::remarks(&look.summary).join("; ");
        let totals = format!("channels {channels}  rate {total}  memory {memory}  {remarks}");
        let mut lines = vec![totals.trim_end().into(), self.header()];
        lines.extend(rows.iter().map(|row| row.text(width)));
        lines.extend(sockets(look));
        lines
    }

    fn header(&self) -> String {
        let columns = COLUMNS.iter().enumerate().map(|(at, (name, width, sort))| {
            let mark = if *sort == Some(self.sort) { "*" } else { "" };
            align(at, &format!("{mark}{name}"), *width)
        });
        columns.collect::<Vec<_>>().join(" ") + " " + LAST
    }
}

impl Row<'_> {
    fn key(&self, sort: Sort) -> f64 {
        let rates = self.rates.unwrap_or_default();
        match sort {
            Sort::Rate => rates.bytes,
            Sort::Calls => rates.calls,
            Sort::Fill => self.fill().unwrap_or(0.0),
            Sort::Sleeps => rates.sleeps,
            Sort::Sent => rates.notifications_sent,
            Sort::Unneeded => rates.notifications_suppressed,
            Sort::Spins => rates.spins_paid,
            Sort::Age => self.channel.age.unwrap_or(0.0),
            Sort::Id => self.channel.id as f64,
        }
    }

    fn fill(&self) -> Option<f64> {
        let pipe = &self.channel.pipes[self.pipe];
        Some(pipe.fill? as f64 / pipe.ring? as f64)
    }

    fn text(&self, width: usize) -> String {
        let number = |field: fn(&Rates) -> f64| self.rates.as_ref().map_or("-".into(), |rates| compact(field(rates)));
        let end = |at: usize| self.channel.ends[at].as_ref();
        let machine = self.channel.machine.as_ref().map(|machine| machine.name.clone());
        let domain = || self.channel.peer_domain.map(|number| format!("dom{number}"));
        let elsewhere = machine.or_else(domain).unwrap_or("?".into());
        let pid = |at: usize| end(at).map_or(elsewhere.clone(), |end| end.pid.to_string());
        let (from, to) = (self.pipe, 1 - self.pipe);
        let cells = [
            format!("{}>{}", pid(from), pid(to)),
            ls::shown(self.channel.state).into(),
            self.rates.map_or("-".into(), |rates| human::rate(rates.bytes)),
            number(|rates| rates.calls),
            self.fill().map_or("-".into(), |fill| format!("{:.0}%", fill * 100.0)),
            number(|rates| rates.sleeps),
            number(|rates| rates.notifications_sent),
            number(|rates| rates.notifications_suppressed),
            number(|rates| rates.spins_paid),
            ring(&self.channel.pipes[from]),
        ];
        let cells = cells.iter().zip(COLUMNS).enumerate().map(|(at, (cell, (_, width, _)))| align(at, cell, width));
        let age = self.channel.age.map_or("-".into(), |age| human::clock(Duration::from_secs_f64(age)));
        let command = |at| end(at).map_or("?", |end: &Endpoint| end.command.as_str());
        let address = self.channel.address.as_deref().unwrap_or("-");
        let commands = format!("{}>{}", command(from), command(to));
        let text = format!("{} {age:8} {address}  {commands}", cells.collect::<Vec<_>>().join(" "));
        text.chars().take(width).collect()
    }
}

/// Returns `1MiB`, or `8KiB/2MiB first` for a ring that follows its load.
fn ring(pipe: &Pipe) -> String {
    let size = pipe.ring.map_or("-".into(), |bytes| size::show(bytes as usize));
    let growth =
        pipe.growth.as_ref().map(|growth| format!("/{} {}", size::show(growth.target as usize), growth.reason));
    size + &growth.unwrap_or_default()
}

fn align(at: usize, text: &str, width: usize) -> String {
    let text: String = text.chars().take(width).collect();
    if at < NUMBERS { format!("{text:width$}") } else { format!("{text:>width$}") }
}

/// Formats a value in at most six columns: `0`, `0.5`, `999`, `12.3k`, `4.56M`.
fn compact(value: f64) -> String {
    const UNITS: [&str; 5] = ["", "k", "M", "G", "T"];
    let step = (0..UNITS.len() - 1).find(|&step| value < 1000f64.powi(step as i32 + 1)).unwrap_or(UNITS.len() - 1);
    let scaled = value / 1000f64.powi(step as i32);
    match scaled {
        _ if value == 0.0 => "0".into(),
        v if step == 0 && v >= 9.95 => format!("{v:.0}"),
        v if v >= 99.95 => format!("{v:.0}{}", UNITS[step]),
        v if v >= 9.995 || step == 0 => format!("{v:.1}{}", UNITS[step]),
        v => format!("{v:.2}{}", UNITS[step]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_inspect::{Growth, Mode, State, Summary};

    fn channel(id: u64, fill: u64) -> Channel {
        let pipe =
            || Pipe { ring: Some(4096), growth: None, fill: Some(fill), bytes: Some(0), writer: None, reader: None };
        let (ends, pipes) = ([None, None], [pipe(), pipe()]);
        let (mode, state) = (Mode::Stream, State::Open);
        Channel {
            id,
            address: Some(format!("local:/{id}")),
            mode,
            state,
            age: Some(5.0),
            memory: 8192,
            peer_domain: None,
            machine: None,
            quarantine: None,
            ends,
            pipes,
        }
    }

    fn sample_look() -> Look {
        let rates = |bytes| Some([Rates { bytes, ..Rates::default() }; 2]);
        let channels = vec![(channel(1, 4096), rates(5.0)), (channel(2, 0), rates(9.0)), (channel(3, 2048), None)];
        let summary = Summary { processes: 1, hidden: 2, broken: 0, unlisted: 0, let_go: 0, broker: None };
        Look { channels, sockets: Vec::new(), summary, seconds: 1.0 }
    }

    fn order(table: &Table) -> Vec<u64> {
        let lines = table.lines(&sample_look(), 200);
        let id = |line: &String| line.split("local:/").nth(1)?.split(' ').next()?.parse().ok();
        lines[2..].iter().map(|line| id(line).unwrap()).collect()
    }

    #[test]
    fn rows_are_sorted_as_the_keys_say() {
        let mut table = Table::new(Sort::Rate, false);
        assert_eq!(order(&table), [2, 2, 1, 1, 3, 3]);
        assert!(table.press(Key::Char('f')));
        assert_eq!(order(&table), [1, 1, 3, 3, 2, 2]);
        assert!(table.press(Key::Char('f')));
        assert_eq!(order(&table), [2, 2, 3, 3, 1, 1], "the same key turns the order round");
        assert!(table.press(Key::Char('x')) && table.press(Key::Char('i')));
        assert_eq!(order(&table), [3, 3, 2, 2, 1, 1]);
        assert!(!table.press(Key::Char('q')));
    }

    #[test]
    fn ring_shows_its_size_its_target_and_why() {
        let mut pipe = channel(1, 0).pipes[0].clone();
        assert_eq!(ring(&pipe), "4KiB");
        pipe.growth = Some(Growth { target: 2 << 20, reason: "pressure" });
        assert_eq!(ring(&pipe), "4KiB/2MiB pressure");
        (pipe.ring, pipe.growth) = (None, None);
        assert_eq!(ring(&pipe), "-");
    }

    #[test]
    fn every_sort_key_has_a_letter() {
        for sort in Sort::value_variants() {
            assert!("rcfsnupai".chars().any(|key| Sort::of_key(key) == Some(*sort)), "{sort:?}");
        }
    }

    #[test]
    fn frame_fits_every_screen_and_says_what_is_hidden() {
        let mut table = Table::new(Sort::Rate, false);
        for (width, height) in [(80, 24), (20, 5), (200, 60), (1, 1), (0, 0), (80, 3)] {
            let frame = table.frame(&sample_look(), width, height);
            assert!(frame.len() <= height, "{height}: {}", frame.len());
            assert!(frame.iter().all(|line| line.chars().count() <= width));
        }
        let frame = table.frame(&sample_look(), 200, 24);
        assert!(frame[0].contains("2 of 3 processes") && frame[1].contains("*RATE") && frame[23] == KEYS);
    }

    #[test]
    fn scrolling_stops_at_both_ends() {
        let mut table = Table::new(Sort::Id, false);
        let _ = table.frame(&sample_look(), 80, 5);
        for _ in 0..20 {
            table.press(Key::Down);
        }
        assert_eq!(table.scrolled, 4, "six rows, two of them seen");
        table.press(Key::PageUp);
        assert_eq!(table.scrolled, 2);
        table.press(Key::PageUp);
        table.press(Key::Up);
        assert_eq!(table.scrolled, 0);
    }

    #[test]
    fn rate_of_nothing_has_no_sign() {
        let nothing = Look { channels: Vec::new(), ..sample_look() };
        let totals = &Table::new(Sort::Rate, false).lines(&nothing, 80)[0];
        assert!(totals.starts_with("channels 0  rate 0.00 B/s  memory 0 B"), "{totals}");
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in
            [(0.0, "0"), (0.5, "0.5"), (12.0, "12"), (999.0, "999"), (12345.0, "12.3k"), (4.56e6, "4.56M")]
        {
            assert_eq!(compact(value), text);
        }
        assert!(compact(1.8e25).len() > 6, "absurd numbers are cut by their column");
    }
}
