// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo link`: asks the host's broker for links between virtual machines.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use clap::Subcommand;
use rustix::event::{Timespec, poll};
use tombolo_bench::size;
use tombolo_control::{Form, LinkState, Message, NO_DOORBELL, Name, Stage, What};
use tombolo_inspect::{ADMIN_SOCKET, Broker, liveness_word};

use crate::{
    failure::{Failure, Os, Result},
    human, output,
};

/// Time that the broker has for an answer.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Time within which a busy guest opens a link that it got; an idle one does so within milliseconds.
const OPENS_WITHIN: Duration = Duration::from_secs(2);
/// Longest time that a broker may be configured to give programs to leave a link (B-21).
pub const LEAVE_MAX: Duration = Duration::from_secs(60);

/// Join virtual machines, take them apart, and show what there is: asks `tombolod` on their host
#[derive(clap::Args)]
pub struct Args {
    /// The broker's socket
    #[arg(long, value_name = "FILE", default_value = ADMIN_SOCKET, global = true)]
    broker: PathBuf,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Give two domains memory to share, now or as soon as both run
    Add {
        /// One of them
        a: Name,
        /// The other
        b: Name,
        /// Bytes for each direction: a power of two from 64KiB [default: as configured]
        #[arg(long, value_name = "SIZE", value_parser = size::parse)]
        size: Option<usize>,
        /// How long to wait until both can use it, where both run; 0: not at all
        #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
        wait: f64,
    },
    /// Take the memory back
    Rm {
        /// One of them
        a: Name,
        /// The other
        b: Name,
    },
    /// Show links, and what is wrong with them
    Ls {
        /// Show domains: their lives, slots and memory
        #[arg(long)]
        domains: bool,
        /// One JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Print what a domain's QEMU must be told to have links
    Snippet {
        /// The domain
        domain: Name,
        /// As libvirt's XML
        #[arg(long)]
        libvirt: bool,
    },
}

pub fn run(args: &Args) -> Result<()> {
    let broker = Broker::connect(&args.broker, PATIENCE)?;
    match &args.action {
        Action::Add { a, b, size, wait } => {
            let (a, b, size) = (a.clone(), b.clone(), size.unwrap_or(0) as u64);
            broker.ask(Message::AddLink { a: a.clone(), b: b.clone(), size })?;
            await_link(&broker, &a, &b, Duration::try_from_secs_f64(*wait).unwrap_or_default())
        }
        Action::Rm { a, b } => {
            // Programs have time to leave the link first (B-21).
            let broker = broker.with_patience(PATIENCE + LEAVE_MAX)?;
            broker.ask(Message::RemoveLink { a: a.clone(), b: b.clone() })?;
            Ok(())
        }
        Action::Ls { domains, json } => {
            if *domains {
                list_domains(&broker, *json)
            } else {
                list(&broker, What::Links, *json)
            }
        }
        Action::Snippet { domain, libvirt } => {
            let form = if *libvirt { Form::Libvirt } else { Form::Qemu };
            let lines = broker.ask(Message::Snippet { form, domain: domain.clone() })?;
            let text = |line: &Message| if let Message::Line { line } = line { Some(line.to_string()) } else { None };
            print(&lines.iter().filter_map(text).collect::<Vec<_>>())
        }
    }
}

/// Prints the domains.
pub fn list_domains(broker: &Broker, json: bool) -> Result<()> {
    list(broker, What::Domains, json)
}

fn list(broker: &Broker, what: What, json: bool) -> Result<()> {
    let rows = broker.ask(Message::List { what })?;
    print(&if json { rows.iter().filter_map(|row| object(row, &rows)).collect() } else { table(what, &rows) })
}

/// Progress of a link that is waited for.
#[derive(Debug, PartialEq, Eq)]
enum Progress<'a> {
    /// Programs of both domains can use it.
    Usable,
    /// It is coming; the text is the broker's note on what delays it, if there is one.
    Coming(&'a str),
    /// Both QEMUs have it, and a guest that runs has not opened it yet.
    Opening(&'a str),
    /// It needs a change that is up to people.
    Waits(String),
    /// There is no such link.
    Gone,
}

fn progress<'a>(a: &Name, b: &Name, rows: &'a [Message]) -> Progress<'a> {
    let of_link = rows.iter().find_map(|row| match row {
        Message::LinkRow { link, a: one, b: other, state, note, .. } if one == a && other == b => {
            Some((*link, *state, note.as_str()))
        }
        _ => None,
    });
    let Some((link, state, note)) = of_link else { return Progress::Gone };
    let ends = ends(link, rows);
    let is_silent = |end: &End<'_>| end.stage == Stage::Silent;
    let is_idle = |end: &End<'_>| is_silent(end) || end.life == tombolo_control::Life::Paused;
    match state {
        LinkState::Waiting if note.is_empty() => Progress::Waits(format!("until both {a} and {b} run")),
        LinkState::Waiting => Progress::Waits(format!("({note})")),
        LinkState::Up if ends.iter().all(|end| end.stage == Stage::Open) => Progress::Usable,
        LinkState::Up if ends.iter().any(is_idle) => Progress::Waits(format!("({note})")),
        LinkState::Up => Progress::Opening(note),
        // A QEMU gets the link once its guest has sent Hello (B-10).
        LinkState::Wanted if ends.iter().any(is_silent) => Progress::Waits(format!("({note})")),
        LinkState::Wanted => Progress::Coming(note),
        LinkState::Leaving => Progress::Gone,
    }
}

/// Waits until both domains of a link can use it, unless one of them does not run or is silent.
fn await_link(broker: &Broker, a: &Name, b: &Name, time: Duration) -> Result<()> {
    let deadline = Instant::now() + time;
    let mut opening_until = None;
    loop {
        let rows = broker.ask(Message::List { what: What::Links })?;
        match progress(a, b, &rows) {
            Progress::Usable => return Ok(()),
            Progress::Waits(why) => {
                crate::failure::print_line(&format!("tombolo: the link waits {why}"));
                return Ok(());
            }
            Progress::Gone => return Err(Failure::Outcome("the link was taken away again".into())),
            Progress::Coming(_) | Progress::Opening(_) if time.is_zero() => return Ok(()),
            // The guest's broker may have ended without any report yet.
            Progress::Opening(note)
                if Instant::now() >= *opening_until.get_or_insert_with(|| Instant::now() + OPENS_WITHIN.min(time)) =>
            {
                crate::failure::print_line(&format!("tombolo: the link waits ({note})"));
                return Ok(());
            }
            Progress::Coming(note) if Instant::now() >= deadline => {
                let note = if note.is_empty() { String::new() } else { format!(": {note}") };
                let seconds = time.as_secs_f64();
                return Err(Failure::Outcome(format!("the link is not up after {seconds} s{note}")));
            }
            Progress::Coming(_) | Progress::Opening(_) => {
                poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 20_000_000 })).os("poll")?;
            }
        }
    }
}

/// Returns the name that the broker at this socket gives its domain.
pub fn name_of(socket: &std::path::Path) -> Result<String> {
    Ok(Broker::connect(socket, PATIENCE)?.domain().to_string())
}

/// Returns the rows of the broker at this socket on its links and domains.
pub fn rows_of(socket: &std::path::Path) -> Result<Vec<Message>> {
    let broker = Broker::connect(socket, PATIENCE)?;
    let mut rows = broker.ask(Message::List { what: What::Links })?;
    rows.extend(broker.ask(Message::List { what: What::Domains })?);
    Ok(rows)
}

fn table(what: What, rows: &[Message]) -> Vec<String> {
    let mut cells = vec![match what {
        What::Links => {
            let heads =
                ["LINK", "A", "B", "SIZE", "GEN", "STATE", "DOORBELLS", "CHANNELS", "USED", "STORMS", "KEPT", "NOTE"];
            heads.map(String::from).to_vec()
        }
        What::Domains => ["DOMAIN", "LIFE", "SLOTS", "MEMORY", "OF", "NOTE"].map(String::from).to_vec(),
    }];
    for row in rows {
        match row {
            Message::LinkRow { link, a, b, size, generation, quarantined, note, .. } => {
                cells.push(vec![
                    link.to_string(),
                    a.to_string(),
                    b.to_string(),
                    human::bytes(*size),
                    generation.to_string(),
                    shown_state(row, rows).into(),
                    of_ends(*link, rows, |end| {
                        if end.doorbell == NO_DOORBELL { "-".into() } else { end.doorbell.to_string() }
                    }),
                    of_ends(*link, rows, |end| end.connections.to_string()),
                    of_ends(*link, rows, |end| human::bytes(end.used)),
                    of_ends(*link, rows, |end| end.storms.to_string()),
                    if *quarantined == 0 { "-".into() } else { human::bytes(*quarantined) },
                    note.to_string(),
                ])
            }
            Message::DomainRow { name, life, slots_used, slots, memory_used, memory, note } => cells.push(vec![
                name.to_string(),
                liveness_word(*life).into(),
                // The host and its accounts have neither slots nor a quota.
                if *slots == 0 { "-".into() } else { format!("{slots_used}/{slots}") },
                human::bytes(*memory_used),
                if *memory == 0 { "-".into() } else { human::bytes(*memory) },
                note.to_string(),
            ]),
            _ => {}
        }
    }
    human::aligned(&cells)
}

/// One endpoint of a link, as the broker reports it.
struct End<'a> {
    name: &'a Name,
    stage: Stage,
    life: tombolo_control::Life,
    doorbell: u16,
    vector: u16,
    connections: u16,
    used: u64,
    storms: u32,
}

/// Returns the endpoints of a link: A, then B.
fn ends(link: u32, rows: &[Message]) -> Vec<End<'_>> {
    let end = |row| match row {
        &Message::EndRow { link: it, ref name, stage, life, doorbell, vector, connections, used, storms }
            if it == link =>
        {
            Some(End { name, stage, life, doorbell, vector, connections, used, storms })
        }
        _ => None,
    };
    rows.iter().filter_map(end).collect()
}

/// Returns one property of both endpoints in one cell.
fn of_ends(link: u32, rows: &[Message], what: impl Fn(&End<'_>) -> String) -> String {
    let cells: Vec<String> = ends(link, rows).iter().map(what).collect();
    if cells.is_empty() { "-".into() } else { cells.join("/") }
}

/// Returns the state to show. A link that both QEMUs have is up only once both guests have opened it.
fn shown_state(row: &Message, rows: &[Message]) -> &'static str {
    let Message::LinkRow { link, state, .. } = row else { return "" };
    let ends = ends(*link, rows);
    match state {
        LinkState::Wanted => "wanted",
        LinkState::Up if ends.iter().any(|end| end.life == tombolo_control::Life::Paused) => "paused",
        LinkState::Up if ends.iter().all(|end| end.stage == Stage::Open) => "up",
        LinkState::Up => "plugged",
        LinkState::Waiting => "waiting",
        LinkState::Leaving => "leaving",
    }
}

fn stage_name(stage: Stage) -> &'static str {
    match stage {
        Stage::Absent => "absent",
        Stage::Unplugged => "unplugged",
        Stage::Silent => "silent",
        Stage::Closed => "closed",
        Stage::Open => "open",
    }
}

fn object(row: &Message, rows: &[Message]) -> Option<String> {
    let end = |end: &End<'_>| {
        serde_json::json!({
            "domain": end.name.as_str(), "stage": stage_name(end.stage), "life": liveness_word(end.life),
            "doorbell": Some(end.doorbell).filter(|doorbell| *doorbell != NO_DOORBELL), "vector": end.vector, "channels": end.connections,
            "used": end.used, "storms": end.storms,
        })
    };
    let value = match row {
        Message::LinkRow { link, generation, a, b, size, state, quarantined, note } => serde_json::json!({
            "link": link, "generation": generation, "a": a.as_str(), "b": b.as_str(), "size": size,
            "state": format!("{state:?}").to_lowercase(), "shown": shown_state(row, rows), "quarantined": quarantined,
            "note": note.as_str(), "ends": ends(*link, rows).iter().map(end).collect::<Vec<_>>(),
        }),
        Message::DomainRow { name, life, slots_used, slots, memory_used, memory, note } => serde_json::json!({
            "domain": name.as_str(), "life": liveness_word(*life), "slots_used": slots_used, "slots": slots,
            "memory_used": memory_used, "memory": memory, "note": note.as_str(),
        }),
        _ => return None,
    };
    Some(value.to_string())
}

fn print(lines: &[String]) -> Result<()> {
    output::unless_unread(lines.iter().try_for_each(|line| output::print(line)))
}

#[cfg(test)]
mod tests {
    use tombolo_control::{Life, Reason};

    use super::*;

    /// Returns a broker's rows of a link of web with db, whose endpoints have got so far.
    fn rows(state: LinkState, note: &str, ends: [(Stage, Life); 2]) -> Vec<Message> {
        let [a, b]: [Name; 2] = ["web", "db"].map(|name| name.parse().unwrap());
        let end = |name: &Name, (stage, life)| Message::EndRow {
            link: 7,
            name: name.clone(),
            stage,
            life,
            doorbell: NO_DOORBELL,
            vector: 0,
            connections: 0,
            used: 0,
            storms: 0,
        };
        let ends = [end(&a, ends[0]), end(&b, ends[1])];
        let note: Reason = note.into();
        let link = Message::LinkRow { link: 7, generation: 1, a, b, size: 65536, state, quarantined: 0, note };
        std::iter::once(link).chain(ends).collect()
    }

    #[test]
    fn link_that_both_qemus_have_is_waited_for_until_both_guests_have_opened_it() {
        let [a, b]: [Name; 2] = ["web", "db"].map(|name| name.parse().unwrap());
        let of = |state, note: &str, stages: [(Stage, Life); 2]| {
            let rows = rows(state, note, stages);
            format!("{:?}", progress(&a, &b, &rows))
        };
        let run = |stage| (stage, Life::Running);
        let open = run(Stage::Open);
        assert_eq!(of(LinkState::Up, "", [open, open]), "Usable");
        for late in [Stage::Unplugged, Stage::Closed] {
            assert_eq!(of(LinkState::Up, "not open", [open, run(late)]), "Opening(\"not open\")");
            assert_eq!(of(LinkState::Wanted, "", [run(late), open]), "Coming(\"\")");
        }
        for state in [LinkState::Up, LinkState::Wanted] {
            assert_eq!(of(state, "no driver", [open, run(Stage::Silent)]), "Waits(\"(no driver)\")");
        }
        assert_eq!(of(LinkState::Up, "paused", [(Stage::Closed, Life::Paused), open]), "Waits(\"(paused)\")");
        let absent = (Stage::Absent, Life::DomainGone);
        assert_eq!(of(LinkState::Waiting, "", [open, absent]), "Waits(\"until both web and db run\")");
        assert_eq!(of(LinkState::Leaving, "", [open, open]), "Gone");
        assert_eq!(format!("{:?}", progress(&b, &a, &rows(LinkState::Up, "", [open, open]))), "Gone");
    }
}
