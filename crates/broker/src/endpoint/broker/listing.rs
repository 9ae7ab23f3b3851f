// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lists connections and listeners of this kernel's programs for tools, to each user its own (B-20).

use std::{
    collections::{BTreeSet, VecDeque},
    io,
};

use tombolo_control::{ConnectionEnd, Message, NOBODY, Progress, Seen, code};
use tombolo_domain_ivshmem::outline::{OUTLINE, outline};

use super::Broker;
use crate::endpoint::{
    connections::{Agreement, Refusal, Stage},
    devices::{Devices, Part, Region},
    link::Link,
    program::{Program, ProgramState},
};

/// Largest number of rows in one answer: they must fit into the socket at once.
const ROWS: usize = 16;
/// Value that stands for an unknown number.
const UNKNOWN: u64 = u64::MAX;

impl<D: Devices> Broker<D> {
    /// Answers, for each user, the first of the requests for a listing. The user's other requests wait until all other
    /// events have had their turn: a listing costs the broker much more than the request, and a user may send many on
    /// many connections at once.
    pub(crate) fn show_in_turn(&mut self) {
        let (mut users, mut later) = (BTreeSet::new(), VecDeque::new());
        for (id, at, after) in std::mem::take(&mut self.looks) {
            let Some(user) = self.programs.get(&id).map(|program| program.user) else { continue };
            if !users.insert(user) {
                later.push_back((id, at, after));
            } else if self.show(id, at, after).is_err() {
                self.programs.remove(&id);
            }
        }
        self.looks = later;
    }

    /// Answers the program `id` with the rows that come after `after`.
    fn show(&mut self, id: u64, at: Seen, after: u64) -> io::Result<()> {
        let Some(user) = self.programs.get(&id).map(|program| program.user) else { return Ok(()) };
        let all = user == 0 || user == rustix::process::geteuid().as_raw();
        let rows = match at {
            Seen::Connections => self.connection_rows(after, |it| all || it == user),
            Seen::Listeners => self.listener_rows(after, |it| all || it == user),
            Seen::Nets => match net_rows(self.nets.as_deref(), after) {
                Ok(rows) => rows,
                Err(no) => {
                    self.programs.get_mut(&id).into_iter().for_each(|program| program.refuse(no.clone()));
                    return Ok(());
                }
            },
        };
        let Some(program) = self.programs.get_mut(&id) else { return Ok(()) };
        program.rest();
        rows.into_iter().try_for_each(|row| program.answer(row))?;
        program.answer(Message::Done {})
    }

    fn listener_rows(&self, after: u64, may_see: impl Fn(u32) -> bool) -> Vec<Message> {
        let row = |(at, program): (&u64, &Program)| match &program.doing {
            ProgramState::Listening(service) if may_see(program.user) && !program.has_left() => {
                Some(Message::ListenerRow {
                    at: *at,
                    service: service.clone(),
                    process: program.process,
                    user: program.user,
                })
            }
            _ => None,
        };
        let behind = self.programs.range(after.saturating_add(1)..);
        behind.filter_map(row).take(ROWS).collect()
    }

    fn connection_rows(&mut self, after: u64, may_see: impl Fn(u32) -> bool) -> Vec<Message> {
        let mut rows = Vec::new();
        for (number, link) in self.links.range_mut((after >> 32) as u32..) {
            let place = |made: &Agreement| u64::from(*number) << 32 | u64::from(made.serial);
            let progress = |stage| match stage {
                Stage::Asked => Some(Progress::Asked),
                Stage::Up => Some(Progress::Up),
                Stage::ClosedThere => Some(Progress::Closed),
                // No program has these connections any more.
                Stage::GivenUp | Stage::Refused | Stage::ClosedHere => None,
            };
            let connections = link.connections.iter().filter_map(|(made, stage)| Some((made, progress(stage)?)));
            let mut connections: Vec<_> = connections.filter(|(made, _)| place(made) > after).collect();
            connections.sort_unstable_by_key(|(made, _)| made.serial);
            for (made, progress) in connections {
                let about = link.about.get(&made.serial);
                if may_see(about.map_or(NOBODY, |about| about.user)) {
                    rows.push(row(link, place(&made), &made, progress));
                }
                if rows.len() == ROWS {
                    return rows;
                }
            }
        }
        rows
    }
}

/// Lists interfaces to every user: they are no secret, because each user of this kernel sees them anyway (B-28).
fn net_rows(nets: Option<&[Message]>, after: u64) -> Result<Vec<Message>, Refusal> {
    let unknown =
        || Refusal(code::FAILED, "the host's broker has not said yet which interfaces there are to be".into());
    let is_behind = |net: &&Message| matches!(net, Message::Net { at, .. } if *at > after);
    Ok(nets.ok_or_else(unknown)?.iter().filter(is_behind).take(ROWS).cloned().collect())
}

fn row<R: Region>(link: &mut Link<R>, at: u64, made: &Agreement, progress: Progress) -> Message {
    // A link without memory has no words to show, but its connections are listed all the same.
    let mut words = |part: Part, (from, len): (u64, u64)| {
        let region = link.memory.as_mut().map(|(region, _)| region);
        region
            .and_then(|region| outline(len, |at, bytes| region.peek(part, from + at, bytes)).ok())
            .unwrap_or([0; OUTLINE])
    };
    let (own_words, their_words) = (words(Part::Own, made.own), words(Part::Theirs, made.theirs));
    let about = link.about.get(&made.serial);
    let alarmed = link.memory.as_ref().is_some_and(|(region, _)| region.alarm().is_some());
    Message::CallRow {
        at,
        link: link.news.link,
        generation: link.news.generation,
        peer: link.news.peer.clone(),
        life: link.news.life,
        service: about.map_or("", |about| about.service.as_str()).into(),
        end: about.map_or(ConnectionEnd::Unknown, |about| about.end),
        progress,
        process: about.map_or(0, |about| about.process),
        user: about.map_or(NOBODY, |about| about.user),
        age: about.map_or(UNKNOWN, |about| u64::try_from(about.since.elapsed().as_millis()).unwrap_or(UNKNOWN)),
        own: made.own.1,
        theirs: made.theirs.1,
        storms: if alarmed { link.storms } else { u32::MAX },
        own_words: Box::new(own_words),
        their_words: Box::new(their_words),
    }
}
