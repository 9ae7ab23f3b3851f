// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo vm`: asks the host's broker to make a virtual machine ready to migrate, and to undo that.

use std::{path::PathBuf, time::Duration};

use clap::Subcommand;
use tombolo_control::{Message, Name, code};
use tombolo_inspect::{ADMIN_SOCKET, Broker, Error};

use crate::{
    cmd::link,
    failure::{Failure, Result},
    human, output,
};

/// Time that a guest has to release its devices, and a broker to report it.
const PATIENCE: Duration = Duration::from_secs(30);

/// Make virtual machines ready to migrate, to be saved or to have a snapshot: asks `tombolod` on their host
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
    /// Leave a machine's links and take its devices away, so that QEMU accepts `migrate`
    ///
    /// Exit codes: 0 it is ready; 2 there is no such machine; 3 no QEMU takes commands. 4 its guest has not let go of a
    /// device yet; 5 QEMU refuses; 6 it was taken back; 7 it was ready already. 1 is anything else.
    PrepareMigration {
        /// The machine
        name: Name,
        /// Print a JSON object, also if it fails
        #[arg(long)]
        json: bool,
    },
    /// Give a machine that stays here its devices and links again
    ///
    /// Exit codes as those of prepare-migration; 6 says that this QEMU gets no device any more.
    CancelMigration {
        /// The machine
        name: Name,
        /// Print a JSON object, also if it fails
        #[arg(long)]
        json: bool,
    },
    /// Show machines: their lives, slots and memory, and which are ready to migrate
    Ls {
        /// One JSON object a line
        #[arg(long)]
        json: bool,
    },
}

pub fn run(args: &Args) -> Result<()> {
    let broker = Broker::connect(&args.broker, link::PATIENCE)?;
    let (name, json, question) = match &args.action {
        Action::Ls { json } => return link::list_domains(&broker, *json),
        Action::PrepareMigration { name, json } => (name, json, Message::Prepare { domain: name.clone() }),
        Action::CancelMigration { name, json } => (name, json, Message::CancelPrepare { domain: name.clone() }),
    };
    let done = broker.with_patience(PATIENCE + link::LEAVE_MAX)?.ask(question).map_err(named);
    let line = if *json { Some(object(name, &done)) } else { text(&args.action, &done) };
    line.map_or(Ok(()), |line| output::unless_unread(output::print(&line)))?;
    done.map(drop)
}

/// Translates a refusal into an exit code.
fn named(error: Error) -> Failure {
    let (code, why) = match error {
        Error::Refused { code, why } => (code, why),
        other => return other.into(),
    };
    let exit = match code {
        code::NOT_FOUND => 2,
        code::NO_QEMU => 3,
        code::KEPT => 4,
        code::QEMU_REFUSES => 5,
        code::MIGRATES => 6,
        code::EXISTS => 7,
        _ => 1,
    };
    Failure::Machine { exit, why }
}

/// Returns the exit code as one word.
fn word(exit: u8) -> &'static str {
    match exit {
        2 => "unknown",
        3 => "no-qemu",
        4 => "kept",
        5 => "refused",
        6 => "migrates",
        7 => "already",
        _ => "failed",
    }
}

fn object(name: &Name, done: &Result<Vec<Message>>) -> String {
    let value = match done {
        Ok(rows) => match rows.first() {
            Some(Message::PreparedRow { links, cut, took, note, .. }) => serde_json::json!({
                "domain": name.as_str(), "done": true, "links": links, "cut": cut, "ms": took, "note": note.as_str(),
            }),
            _ => serde_json::json!({ "domain": name.as_str(), "done": true }),
        },
        Err(failure) => {
            let exit = if let Failure::Machine { exit, .. } = failure { *exit } else { 1 };
            serde_json::json!({ "domain": name.as_str(), "done": false, "error": word(exit), "says": failure.chain() })
        }
    };
    value.to_string()
}

fn text(action: &Action, done: &Result<Vec<Message>>) -> Option<String> {
    match (done, action) {
        (Ok(rows), _) => rows.iter().find_map(|row| match row {
            Message::PreparedRow { domain, links, took, note, .. } => {
                let note = if note.as_str().is_empty() { String::new() } else { format!("; {note}") };
                let took = human::seconds(Duration::from_millis((*took).into()));
                Some(format!("{domain} is ready to migrate after {took}, {links} links were left{note}"))
            }
            _ => None,
        }),
        (Err(_), _) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_have_exit_codes_and_words_of_their_own() {
        let exit = |code: u16| match named(Error::Refused { code, why: "why".into() }) {
            Failure::Machine { exit, why } if why == "why" => (exit, word(exit)),
            other => panic!("{other:?}"),
        };
        let all = [code::NOT_FOUND, code::NO_QEMU, code::KEPT, code::QEMU_REFUSES, code::MIGRATES, code::EXISTS];
        let words = ["unknown", "no-qemu", "kept", "refused", "migrates", "already"];
        assert_eq!(all.map(exit), [2, 3, 4, 5, 6, 7].map(|exit: u8| (exit, words[usize::from(exit) - 2])));
        assert_eq!(exit(code::DENIED), (1, "failed"));
    }

    #[test]
    fn object_says_what_was_left_and_what_was_cut() {
        let name: Name = "web".parse().unwrap();
        let row = Message::PreparedRow { domain: name.clone(), links: 2, cut: 1, took: 681, note: "n".into() };
        let value: serde_json::Value = serde_json::from_str(&object(&name, &Ok(vec![row]))).unwrap();
        assert_eq!(
            value,
            serde_json::json!({
                "domain": "web", "done": true, "links": 2, "cut": 1, "ms": 681, "note": "n",
            })
        );
        let failure = Failure::Machine { exit: 4, why: "it keeps a device".into() };
        let value: serde_json::Value = serde_json::from_str(&object(&name, &Err(failure))).unwrap();
        assert_eq!(
            value,
            serde_json::json!({
                "domain": "web", "done": false, "error": "kept", "says": "it keeps a device",
            })
        );
    }
}
