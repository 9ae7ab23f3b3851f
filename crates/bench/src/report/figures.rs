// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Selects the results of each chart.

use std::collections::{BTreeMap, BTreeSet};

use super::svg::{Bar, Bars, Curve, LinePlot, Point, Scale};
use crate::job::{Cpu, Mode, Test, Wait};
use crate::line::Placement;
use crate::result::Measurement;
use crate::{size, table, transport};

/// A chart and its description.
pub struct Figure<'a> {
    /// File name without an extension.
    pub name: String,
    /// Description of how the results were measured.
    pub caption: &'static str,
    /// Drawing, as part of a page.
    pub svg: String,
    /// Results that it was made from; empty if the figure before shows the same ones.
    pub results: Vec<&'a Measurement>,
}

/// Transports in the order of their looks, see [`super::svg::LOOKS`].
const KNOWN: [(&str, &str); 18] = [
    ("tombolo", "Tombolo stream"),
    ("tombolo (messages)", "Tombolo messages"),
    ("tcp", "TCP, loopback"),
    ("tcp-veth", "TCP, two namespaces"),
    ("unix-stream", "UNIX stream"),
    ("unix-seqpacket", "UNIX seqpacket"),
    ("pipe", "pipe"),
    ("memcpy", "memcpy of one core"),
    ("line", "one cache line"),
    ("iceoryx2", "iceoryx2"),
    ("iceoryx2-untouched", "iceoryx2, untouched"),
    ("rtrb", "rtrb, two threads"),
    ("shmem-ipc", "shmem-ipc"),
    ("libxenvchan-shape", "libxenvchan's shape"),
    ("ipmpsc", "ipmpsc"),
    ("eventfd", "eventfd"),
    ("raw-copy", "raw copy between two cores"),
    ("two-lines", "two cache lines"),
];
/// Transports that are limits and not rivals.
const YARDSTICKS: [&str; 5] = ["memcpy", "raw-copy", "line", "two-lines", "eventfd"];

/// Returns the charts, in the order of the results.
pub fn figures(measurements: &[Measurement]) -> Vec<Figure<'_>> {
    let mut figures: Vec<Figure<'_>> = Vec::new();
    for results in table::groups(measurements) {
        let (test, name, title) = (results[0].test, slug(results[0]), sentence(&table::title(results[0])));
        let svg = match test {
            Test::Throughput | Test::Rate | Test::Latency | Test::Channels if one_place(&results) => {
                bars(&title, &results, Scale::Linear)
            }
            Test::Throughput | Test::Channels => lines(&title, &results, Scale::Linear),
            Test::Rate | Test::Latency => lines(&title, &results, Scale::Log),
            Test::Load => percentiles(&title, &results),
            Test::Switches => counts(&results),
            Test::Cpu | Test::Setup | Test::Memory => bars(&title, &results, Scale::Linear),
        };
        let again = (test == Test::Throughput && !one_place(&results)).then(|| {
            let title = format!("{title}, on a logarithmic scale");
            let svg = lines(&title, &results, Scale::Log);
            Figure { name: format!("{name}-log"), caption: caption(test), svg, results: Vec::new() }
        });
        figures.push(Figure { name, caption: caption(test), svg, results });
        figures.extend(again);
    }
    figures
}

fn slug(m: &Measurement) -> String {
    let mut name = m.test.name();
    name += match m.wait {
        Some(Wait::Spin) => "-spin",
        Some(Wait::Sleep) => "-sleep",
        None => "",
    };
    if m.cpu == Cpu::Same {
        name += "-same-cpu";
    }
    if m.neighbour == Some(true) {
        name += "-neighbour";
    }
    if let Some(rate) = m.rate {
        name += &format!("-{rate}");
    }
    if let Some(think) = m.think_ns {
        name += &format!("-think-{}us", think / 1000);
    }
    name
}

/// Returns the text with a capital.
fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_uppercase().chain(chars).collect())
}

fn caption(test: Test) -> &'static str {
    match test {
        Test::Throughput => {
            "One direction between two processes, copied from a private buffer and into a private buffer, and checked. The \
             receiver of a stream takes what is there."
        }
        Test::Rate => "One direction between two processes; the receiver takes messages one by one.",
        Test::Latency => {
            "There and back between two processes, less the time in which the ends were busy on purpose. Medians of \
             blocks of round trips; percentiles of single ones are in the numbers."
        }
        Test::Load => {
            "An open loop: messages are due at fixed moments, whatever became of those before, and a message's delay \
             counts from the moment when it was due until the receiver has it. Each transport waits as it does by itself."
        }
        Test::Switches => "Both processes together, for each GiB. A notification is a system call that wakes the peer.",
        Test::Setup => "Connect, a byte there and back, close; one after another.",
        Test::Channels => "All channels of two processes on two CPUs, a thread for each end.",
        Test::Cpu => "User and system time of both processes for each GiB, whatever they did with it: spinning counts.",
        Test::Memory => "Of both processes, for each channel beyond the first; pages that both map count once.",
    }
}

/// Returns the name of a transport for people.
pub fn name_of(transport: &str, mode: Mode) -> String {
    let key = key(transport, mode);
    KNOWN.iter().find(|(known, _)| *known == key).map_or(key, |(_, name)| (*name).to_owned())
}

fn key(transport: &str, mode: Mode) -> String {
    let apart = transport == "tombolo" && mode == Mode::Message;
    if apart { format!("{transport} (messages)") } else { transport.to_owned() }
}

/// Returns the look of a transport: a fixed one for each known transport; others share the rest by a hash of their
/// names.
fn series_style(transport: &str, mode: Mode) -> usize {
    let key = key(transport, mode);
    let other = || 9 + key.bytes().map(usize::from).sum::<usize>() % (KNOWN.len() - 9);
    KNOWN.iter().position(|(known, _)| *known == key).unwrap_or_else(other)
}

/// Returns a size with its unit: `64 B`, `4 KiB`.
pub fn size_of(bytes: usize) -> String {
    let text = size::show(bytes);
    match text.find(|c: char| !c.is_ascii_digit()) {
        Some(at) => format!("{} {}", &text[..at], &text[at..]),
        None => format!("{text} B"),
    }
}

/// Returns the place of a result on the horizontal axis.
fn place(m: &Measurement) -> usize {
    if m.test == Test::Channels { m.channels } else { m.size }
}

/// Returns whether a result is the same at every place.
fn is_level(m: &Measurement) -> bool {
    transport::find(&m.transport, m.mode).is_ok_and(|t| t.card().size.is_some())
}

fn one_place(group: &[&Measurement]) -> bool {
    group.iter().filter(|m| !is_level(m)).map(|m| place(m)).collect::<BTreeSet<_>>().len() <= 1
}

/// Returns the results of each transport. Rings of several sizes in one place make several series of it, distinguished
/// by the name.
fn series<'a>(group: &[&'a Measurement]) -> Vec<(String, usize, Vec<&'a Measurement>)> {
    let mut transports: Vec<(&str, Mode)> = Vec::new();
    for m in group {
        if !transports.contains(&(&m.transport, m.mode)) {
            transports.push((&m.transport, m.mode));
        }
    }
    let mut all = Vec::new();
    for (transport, mode) in transports {
        let own: Vec<_> = group.iter().copied().filter(|m| m.transport == transport && m.mode == mode).collect();
        let places: BTreeSet<_> = own.iter().map(|m| place(m)).collect();
        let name = name_of(transport, mode);
        if places.len() == own.len() {
            all.push((name, 0, own));
            continue;
        }
        let mut rings: BTreeMap<Option<usize>, Vec<&Measurement>> = BTreeMap::new();
        own.into_iter().for_each(|m| rings.entry(m.ring).or_default().push(m));
        for (nth, (ring, mut own)) in rings.into_iter().enumerate() {
            own.sort_by_key(|m| place(m));
            own.dedup_by_key(|m| place(m));
            let name = ring.map_or(name.clone(), |ring| format!("{name}, {} ring", size_of(ring)));
            all.push((name, nth, own));
        }
    }
    all
}

/// Returns the placement of the CPUs in most of the results.
fn usual(group: &[&Measurement]) -> Placement {
    let of = |placement| group.iter().filter(|m| m.placement == placement).count();
    let all = [Placement::Unknown, Placement::Mixed, Placement::Same, Placement::Far, Placement::Core, Placement::Near];
    all.into_iter().max_by_key(|placement| of(*placement)).unwrap_or(Placement::Unknown)
}

fn point(m: &Measurement, name: &str, x: f64, usual: Placement) -> Point {
    let show = |value| table::human(value, m.test);
    let placement = match m.placement {
        Placement::Near => ", CPUs near",
        Placement::Core => ", two threads of one core",
        Placement::Far => ", CPUs far apart",
        Placement::Mixed => ", CPUs moved meanwhile",
        Placement::Same | Placement::Unknown => "",
    };
    let (value, low, high, runs) = (show(m.median), show(m.min), show(m.max), m.runs);
    let spread = if runs > 1 { format!(" ({low} to {high} in {runs} runs{placement})") } else { placement.into() };
    let of = match m.test {
        Test::Channels => format!("{} × {}", m.channels, size_of(m.size)),
        _ => size_of(m.size),
    };
    Point {
        x,
        y: m.median,
        low: m.min,
        high: m.max,
        note: format!("{name}, {of}: {value}{spread}"),
        pale: m.placement != usual,
    }
}

fn lines(title: &str, group: &[&Measurement], y_scale: Scale) -> String {
    let (test, usual) = (group[0].test, usual(group));
    let mut places = BTreeSet::new();
    let curves = series(group).into_iter().map(|(name, nth, mut own)| {
        own.sort_by_key(|m| place(m));
        let first = own[0];
        let level = is_level(first);
        if !level {
            places.extend(own.iter().map(|m| place(m)));
        }
        let dashes = if YARDSTICKS.contains(&first.transport.as_str()) { 1 } else { nth };
        let points = own.iter().map(|m| point(m, &name, place(m) as f64, usual)).collect();
        Curve { look: series_style(&first.transport, first.mode), name, dashes, level, points }
    });
    let curves = curves.collect();
    let tick = |&place: &usize| (place as f64, if test == Test::Channels { place.to_string() } else { size_of(place) });
    let x_name = if test == Test::Channels { "channels at once" } else { "message size" };
    LinePlot {
        title: title.into(),
        x_name: x_name.into(),
        y_name: axis_name(test).into(),
        ticks: places.iter().map(tick).collect(),
        x_scale: Scale::Log,
        y_scale,
        show: short(test),
        curves,
    }
    .draw()
}

fn axis_name(test: Test) -> &'static str {
    match test {
        Test::Throughput | Test::Channels | Test::Rate => "more is better",
        _ => "less is better",
    }
}

fn percentiles(title: &str, group: &[&Measurement]) -> String {
    let sizes: BTreeSet<_> = group.iter().map(|m| m.size).collect();
    let marks = ["50 %", "90 %", "99 %", "99.9 %"];
    let (mut curves, usual) = (Vec::new(), usual(group));
    for (name, nth, own) in series(group) {
        for m in own {
            let name = if sizes.len() > 1 { format!("{name}, {}", size_of(m.size)) } else { name.clone() };
            let show = |value| table::human(value, m.test);
            let values = [Some(m.median), m.p90, m.p99, m.p999];
            let points = values.into_iter().enumerate().filter_map(|(i, value)| {
                let value = value?;
                let whole = point(m, &name, 0.0, usual);
                let (low, high) = if i == 0 { (whole.low, whole.high) } else { (value, value) };
                let note = format!("{name}: {} of the messages within {}", marks[i], show(value));
                Some(Point { x: i as f64, y: value, low, high, note, pale: whole.pale })
            });
            let points = points.collect();
            curves.push(Curve { look: series_style(&m.transport, m.mode), name, dashes: nth, level: false, points });
        }
    }
    let title = match sizes.first() {
        Some(only) if sizes.len() == 1 => format!("{title}, {} each", size_of(*only)),
        _ => title.into(),
    };
    LinePlot {
        title,
        x_name: "share of the messages that were there within that time from when they were due".into(),
        y_name: axis_name(Test::Load).into(),
        ticks: marks.iter().enumerate().map(|(i, text)| (i as f64, (*text).into())).collect(),
        x_scale: Scale::Linear,
        y_scale: Scale::Log,
        show: short(Test::Load),
        curves,
    }
    .draw()
}

fn bars(title: &str, group: &[&Measurement], scale: Scale) -> String {
    let (test, usual) = (group[0].test, usual(group));
    let heading = |m: &Measurement| match test {
        Test::Setup => String::new(),
        Test::Memory => format!("{} channels", m.channels),
        Test::Channels => format!("{} channels, {} each time", m.channels, size_of(m.size)),
        _ => format!("Messages of {}", size_of(m.size)),
    };
    let mut groups: Vec<(String, Vec<Bar>)> = Vec::new();
    for (name, _, own) in series(group) {
        for m in own {
            // A transport of only one size is shown under the heading of the others.
            let heading = heading(if is_level(m) { group[0] } else { m });
            let bar = Bar {
                look: series_style(&m.transport, m.mode),
                point: point(m, &name, 0.0, usual),
                name: name.clone(),
            };
            match groups.iter_mut().find(|(known, _)| *known == heading) {
                Some((_, bars)) => bars.push(bar),
                None => groups.push((heading, vec![bar])),
            }
        }
    }
    Bars { title: title.into(), scale, show: short(test), groups }.draw()
}

/// Draws the kernel's work for a GiB.
fn counts(group: &[&Measurement]) -> String {
    type Value = fn(&Measurement) -> Option<f64>;
    let kinds: [(&str, Value); 3] = [
        ("Voluntary context switches", |m| m.voluntary.or(Some(m.median))),
        ("System calls", |m| m.syscalls),
        ("Notifications", |m| m.notifications),
    ];
    let show = |value: f64| if value < 10.0 { trim(&format!("{value:.1}")) } else { table::grouped(value) };
    let (mut groups, usual) = (Vec::new(), usual(group));
    for (i, (heading, value)) in kinds.into_iter().enumerate() {
        let mut bars = Vec::new();
        for (name, _, own) in series(group) {
            for (m, y) in own.iter().filter_map(|m| Some((m, value(m)?))) {
                let (low, high) = if i == 0 { (m.min, m.max) } else { (y, y) };
                let note = format!("{name}, {}: {} for each GiB", size_of(m.size), show(y));
                let point = Point { x: 0.0, y, low, high, note, pale: m.placement != usual };
                bars.push(Bar { name: name.clone(), look: series_style(&m.transport, m.mode), point });
            }
        }
        if !bars.is_empty() {
            groups.push((heading.to_owned(), bars));
        }
    }
    let title = format!("What 1 GiB in writes of {} takes", size_of(group[0].size));
    Bars { title, scale: Scale::Log, show, groups }.draw()
}

/// Returns a formatter for values of that test, in as few digits as they have.
fn short(test: Test) -> fn(f64) -> String {
    fn of(value: f64, test: Test) -> String {
        if value == 0.0 {
            return "0".into();
        }
        let text = table::human(value, test);
        match text.split_once(' ') {
            Some((number, unit)) => format!("{} {unit}", trim(number)),
            None => trim(&text),
        }
    }
    match test {
        Test::Throughput | Test::Channels => |value| of(value, Test::Throughput),
        Test::Rate => |value| of(value, Test::Rate),
        Test::Latency | Test::Load => |value| of(value, Test::Latency),
        Test::Setup => |value| of(value, Test::Setup),
        Test::Memory => |value| of(value, Test::Memory),
        Test::Switches => |value| of(value, Test::Switches),
        Test::Cpu => |value| of(value, Test::Cpu),
    }
}

/// Removes the zeroes after the decimal point.
fn trim(number: &str) -> String {
    if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.').into() } else { number.into() }
}
