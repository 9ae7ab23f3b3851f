// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Answers questions from the socket (B-15, B-17).

use std::{io, time::Instant};

use tombolo_control::{Message, Name, What, code};

use crate::{
    config::is_region,
    host::{
        broker::Broker,
        event::{Question, refuse},
        overview::Overview,
        paths, snippet,
        state::is_unsaved,
        units::bytes,
    },
};

/// Returns whether a user may change something: root and the broker's own user may.
fn may_change(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

impl Broker {
    /// Answers a question now, or once the request is carried out.
    pub(super) fn answer_question(&mut self, question: Question) -> io::Result<()> {
        let Question { message, user, answer } = question;
        let began = Instant::now();
        if let (Message::RemoveLink { a, b }, true) = (&message, may_change(user))
            && let Ok(link) = self.domains.removable_link(a, b)
        {
            // The asker is answered once it is done.
            return self.begin_removal(link, "it is removed", Some(answer));
        }
        match &message {
            Message::Prepare { domain } if may_change(user) => {
                self.migrations.prepare_machine(domain, answer, &self.domains, self.ask_again);
                return Ok(());
            }
            Message::CancelPrepare { domain } if may_change(user) => {
                self.migrations.cancel_preparation(domain, answer, &self.domains);
                return Ok(());
            }
            _ => {}
        }
        let answers = match self.answers_to(message, user) {
            // It is done, but may be undone by a broker that starts before it is saved.
            Err(error) if is_unsaved(&error) => refuse(code::FAILED, format!("{error}; this is tried again")),
            answers => answers?,
        };
        // An asker who has stopped waiting gets no answer.
        let _ = answer.send((answers, began.elapsed()));
        Ok(())
    }

    fn answers_to(&mut self, message: Message, user: u32) -> io::Result<Vec<Message>> {
        let own = may_change(user);
        let Self { domains, memory, leaving, migrations, storms, .. } = &*self;
        let overview = Overview { domains, memory, leaving, migrations, storms };
        Ok(match message {
            Message::List { what: What::Links } => overview.list_links(),
            Message::List { what: What::Domains } => overview.list_domains(),
            Message::AddLink { .. }
            | Message::RemoveLink { .. }
            | Message::Snippet { .. }
            | Message::Prepare { .. }
            | Message::CancelPrepare { .. }
                if !own =>
            {
                refuse(code::DENIED, format!("user {user} may look, and change nothing: ask root"))
            }
            Message::AddLink { a, b, size } => self.add_link(&a, &b, size)?,
            Message::RemoveLink { a, b } => self.domains.removable_link(&a, &b).err().unwrap_or_default(),
            Message::Snippet { form, domain } => match self.domains.config.domains.get(domain.as_str()) {
                Some(found) => {
                    let lines = snippet::lines(form, &domain, found, &self.journal.folder, &self.domains.config);
                    let lines = lines.into_iter().map(|line| Message::Line { line: line.into() });
                    lines.chain([Message::Done {}]).collect()
                }
                None => self.domains.unknown(&domain),
            },
            _ => {
                let programs = paths::program_socket(&self.journal.folder);
                refuse(code::UNSUPPORTED, format!("this socket is for tools; programs use {}", programs.display()))
            }
        })
    }

    fn add_link(&mut self, a: &Name, b: &Name, size: u64) -> io::Result<Vec<Message>> {
        let size = if size == 0 { self.domains.config.region } else { size };
        if let Some(missing) = [a, b].into_iter().find(|name| !self.domains.config.knows(name.as_str())) {
            return Ok(self.domains.unknown(missing));
        }
        if !is_region(size) {
            let size = bytes(size);
            return Ok(refuse(code::FAILED, format!("{size}: a region is a power of two from 64KiB to 1GiB")));
        }
        if !self.domains.config.may_link(a, b) {
            let path = self.domains.config.path.display();
            return Ok(refuse(
                code::DENIED,
                format!("no rule allows {a} and {b} anything: add an [[allow]] to {path}"),
            ));
        }
        if let Some(why) = [a, b].into_iter().find_map(|name| self.migrations.why_without_links(name.as_str())) {
            return Ok(refuse(code::MIGRATES, why));
        }
        if self.domains.state.link_between(a, b).is_some() {
            return Ok(refuse(code::EXISTS, format!("{a} and {b} have a link already")));
        }
        Ok(match self.domains.insert_link([a, b], size, false, &mut self.journal)? {
            Some((code, why)) => refuse(code, why),
            None => vec![Message::Done {}],
        })
    }
}
