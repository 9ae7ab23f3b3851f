// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Asks the broker of a host of virtual machines about them and their links.

use std::path::Path;

use tombolo_control::{Life, LinkState, Message, Stage};

use tombolo_inspect::ADMIN_SOCKET;

use super::finding::{Finding, Grade};
use crate::cmd::link;

/// Answer of this host's broker: links with their endpoints, and domains; or why it does not answer. `None` if there is
/// no broker.
pub type BrokerAnswer = Option<Result<Vec<Message>, String>>;

/// Asks the broker of this host.
pub fn probe() -> BrokerAnswer {
    let socket = Path::new(ADMIN_SOCKET);
    socket.exists().then(|| link::rows_of(socket).map_err(|error| error.to_string()))
}

/// Judges the virtual machines of this host and their links.
pub fn machines(said: &BrokerAnswer) -> Finding {
    let rows = match said {
        None => return Finding::new("machines", Grade::Info, "no broker of virtual machines runs on this machine"),
        Some(Err(why)) => {
            let says = format!("the broker of this host's virtual machines does not answer: {why}");
            return Finding::new("machines", Grade::Warning, says)
                .mend("systemctl start tombolod; only root and the configuration's `group` may ask it");
        }
        Some(Ok(rows)) => rows,
    };
    let troubles: Vec<String> = rows.iter().filter_map(trouble).collect();
    let count = |is: &dyn Fn(&Message) -> bool| rows.iter().filter(|row| is(row)).count();
    let links = count(&|row| matches!(row, Message::LinkRow { .. }));
    let up = count(&|row| matches!(row, Message::LinkRow { state: LinkState::Up, .. }));
    let run = count(&|row| matches!(row, Message::DomainRow { life: Life::Running, slots, .. } if *slots != 0));
    let all = count(&|row| matches!(row, Message::DomainRow { slots, .. } if *slots != 0));
    let says = format!("{run} of {all} virtual machines run, and {up} of their {links} links are plugged");
    if troubles.is_empty() {
        return Finding::new("machines", Grade::Ok, says);
    }
    Finding::new("machines", Grade::Warning, format!("{says}; {}", troubles.join("; ")))
        .mend("`tombolo link ls` and `tombolo link ls --domains` say more")
}

/// Describes the trouble that a row shows, if any.
fn trouble(row: &Message) -> Option<String> {
    match row {
        Message::EndRow { link, name, stage: Stage::Silent, life: Life::Running, .. } => Some(format!(
            "the guest {name} says nothing of link {link}: has it the driver, and does tombolod --guest run there?"
        )),
        Message::EndRow { link, name, stage: Stage::Closed, life: Life::Running, .. } => {
            Some(format!("the guest {name} has a broker and has not opened link {link}: see dmesg there"))
        }
        Message::DomainRow { name, life: Life::Unknown, note, .. } => {
            Some(format!("the QEMU of {name} cannot be reached: {note}"))
        }
        Message::DomainRow { name, life: Life::Paused, .. } => Some(format!("{name} is paused")),
        Message::DomainRow { life: Life::Running, slots, note, .. } if *slots != 0 && !note.as_str().is_empty() => {
            Some(note.to_string())
        }
        // A machine that is ready to migrate has no connection with the broker.
        Message::DomainRow { life: Life::DomainGone, slots, note, .. } if *slots != 0 && !note.as_str().is_empty() => {
            Some(note.to_string())
        }
        Message::LinkRow { link, state: LinkState::Leaving, note, .. } => Some(format!("link {link} is gone: {note}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domain(name: &str, life: Life, note: &str) -> Message {
        let (name, note) = (name.parse().unwrap(), note.into());
        Message::DomainRow { name, life, slots_used: 2, slots: 28, memory_used: 0, memory: 0, note }
    }

    fn end(name: &str, stage: Stage) -> Message {
        let (name, life) = (name.parse().unwrap(), Life::Running);
        Message::EndRow { link: 7, name, stage, life, doorbell: 2, vector: 1, connections: 0, used: 0, storms: 0 }
    }

    fn leaving(note: &str) -> Message {
        let [a, b] = ["a", "b"].map(|name| name.parse().unwrap());
        let (state, note) = (LinkState::Leaving, note.into());
        Message::LinkRow { link: 7, generation: 1, a, b, size: 1 << 20, state, quarantined: 2 << 20, note }
    }

    #[test]
    fn host_of_machines_says_which_guests_have_no_driver_and_which_qemus_are_lost() {
        assert_eq!(machines(&None).grade, Grade::Info);
        let finding = machines(&Some(Err("no".into())));
        assert!(finding.grade == Grade::Warning && finding.remedy.is_some());
        let sound = [domain("a", Life::Running, ""), domain("b", Life::DomainGone, ""), end("a", Stage::Open)];
        let finding = machines(&Some(Ok(sound.to_vec())));
        assert_eq!(
            (finding.grade, finding.says.as_str()),
            (Grade::Ok, "1 of 2 virtual machines run, and 0 of their 0 links are plugged")
        );
        for (row, says) in [
            (end("a", Stage::Silent), "the guest a says nothing of link 7"),
            (end("a", Stage::Closed), "the guest a has a broker"),
            (domain("a", Life::Unknown, "no such file"), "the QEMU of a cannot be reached: no such file"),
            (domain("a", Life::Paused, ""), "a is paused"),
            (domain("a", Life::DomainGone, "a is ready to migrate"), "a is ready to migrate"),
            (domain("a", Life::Running, "a rings b without end"), "a rings b without end"),
            (leaving("not given back by a"), "link 7 is gone: not given back by a"),
        ] {
            let finding = machines(&Some(Ok(vec![row])));
            assert!(finding.grade == Grade::Warning && finding.says.contains(says), "{}", finding.says);
        }
    }
}
