// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The connections of one link: serials, event channels and memory, and what is free of them (B-14, V-3). No I/O.
//!
//! Both ends choose serials and event channels for the connections that they begin. So that they seldom choose the
//! same, side 0 takes odd serials and channels from the bottom, side 1 even ones and channels from the top.

use std::collections::BTreeMap;

use tombolo_control::{CHANNELS, CONNECTION_CHANNELS, WINDOWS_AT, channel_is_sound, code, window_is_sound};

/// Most connections of a link: channel 0 is the brokers'.
pub(crate) const CONNECTIONS_MAX: u16 = (CHANNELS - 1) / CONNECTION_CHANNELS;

/// Most connections that programs of one user have on a link: some are left for the others.
const CONNECTIONS_OF_ONE: usize = 3 * CONNECTIONS_MAX as usize / 4;

/// In whole pages.
const PAGE: u64 = 4096;
/// A connection gets one part in so many of what is left of the region (V-8).
const SHARE: u64 = 8;
/// The least that a connection gets: room for a mailbox and a segment with a ring of 64 KiB (V-8).
const WINDOW_MIN: u64 = 72 << 10;

/// A range of a region: offset and bytes.
pub type Range = (u64, u64);

/// What was agreed of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Agreement {
    /// Its number on this link (B-14).
    pub serial: u32,
    /// This end's window of its own region.
    pub own: Range,
    /// The peer's of its region; empty until it said so.
    pub theirs: Range,
    /// The first of its event channels (V-3).
    pub channel: u16,
}

/// How far a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Connect was sent.
    Asked,
    /// Connect was sent, and the program does not wait.
    GivenUp,
    /// The peer refused, or forgot that it was asked. The program may have its window still.
    Refused,
    /// Both sides agreed.
    Up,
    /// This side said Close.
    ClosedHere,
    /// The peer said Close.
    ClosedThere,
}

/// What is to be done about a connection that the peer listed after a restart (B-18).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResumeAction {
    /// Nothing.
    AsItWas,
    /// The peer agreed, and how it did was not known here: the program that asked is to be told.
    Agreed(Agreement),
    /// The peer's side is over: the program that has it is to be told.
    ClosedThere,
    /// It is over on both sides.
    Ended,
    /// This side does not know it: its state is to be closed in its window, if that is known, and Close to be said.
    Lost(Agreement),
}

/// Why not, for programs and for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal(pub u16, pub String);

fn no<T>(code: u16, why: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal(code, why.into()))
}

/// The connections of one link.
#[derive(Debug)]
pub struct Connections {
    /// Which side of the link this is, 0 or 1 (B-14).
    side: u8,
    region: u64,
    window: u64,
    serial: u32,
    connections: BTreeMap<u32, (Agreement, Stage)>,
    /// Whose programs have which. Of a connection that an earlier broker left it is not known.
    users: BTreeMap<u32, u32>,
}

impl Connections {
    /// None yet. `side` is the host's word; windows are of `window` bytes at most, a multiple of 4096.
    #[must_use]
    pub fn new(side: u8, region: u64, window: u64) -> Self {
        let serial = if side == 0 { 1 } else { 2 };
        Self { side, region, window, serial, connections: BTreeMap::new(), users: BTreeMap::new() }
    }

    /// A connection and how far it is.
    #[must_use]
    pub fn get(&self, serial: u32) -> Option<(Agreement, Stage)> {
        self.connections.get(&serial).copied()
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (Agreement, Stage)> {
        self.connections.values().copied()
    }

    /// Restores a connection that programs had when an earlier broker ended, as far as its windows tell (B-16).
    pub fn restore(&mut self, made: Agreement) {
        self.connections.insert(made.serial, (made, Stage::Up));
    }

    /// Whether programs of `user` may have one more connection.
    ///
    /// # Errors
    /// They have as many as one user may.
    pub fn room_for(&mut self, user: u32) -> Result<(), Refusal> {
        self.users.retain(|serial, _| self.connections.contains_key(serial));
        match self.users.values().filter(|it| **it == user).count() {
            CONNECTIONS_OF_ONE.. => {
                no(code::QUOTA, format!("user {user} has {CONNECTIONS_OF_ONE} connections on this link: close some"))
            }
            _ => Ok(()),
        }
    }

    /// A connection is of a program of `user`.
    pub fn belongs(&mut self, serial: u32, user: u32) {
        self.users.insert(serial, user);
    }

    /// A program connects: what to ask the peer for.
    ///
    /// # Errors
    /// Something is used up.
    pub fn ask(&mut self) -> Result<Agreement, Refusal> {
        let channel = self.free_channel()?;
        let own = self.free_range()?;
        while self.connections.contains_key(&self.serial) {
            self.serial = self.serial.wrapping_add(2).max(if self.side == 0 { 1 } else { 2 });
        }
        let made = Agreement { serial: self.serial, own, theirs: (0, 0), channel };
        self.connections.insert(self.serial, (made, Stage::Asked));
        self.serial = self.serial.wrapping_add(2).max(if self.side == 0 { 1 } else { 2 });
        Ok(made)
    }

    /// The peer asks for a connection, with its window and the first of its event channels.
    ///
    /// # Errors
    /// It may not have that, or something is used up.
    pub fn asked(&mut self, serial: u32, theirs: Range, channel: u16) -> Result<Agreement, Refusal> {
        if (serial % 2 == 1) == (self.side == 0) || serial == 0 || self.connections.contains_key(&serial) {
            return no(code::MALFORMED, format!("serial {serial} is not the caller's to use (B-14)"));
        }
        self.check_theirs(theirs)?;
        if !channel_is_sound(channel) {
            return no(code::MALFORMED, format!("event channel {channel} (B-14)"));
        }
        if self.connections.values().any(|(made, _)| made.channel == channel) {
            return no(code::QUOTA, format!("event channel {channel} is taken: the link has too many connections"));
        }
        let made = Agreement { serial, own: self.free_range()?, theirs, channel };
        self.connections.insert(serial, (made, Stage::Up));
        Ok(made)
    }

    /// The peer accepted. What was agreed; none if the program does not wait: then the connection is to be ended.
    ///
    /// # Errors
    /// It was not asked, or says what cannot be.
    pub fn accepted(&mut self, serial: u32, theirs: Range) -> Result<Option<Agreement>, Refusal> {
        self.check_theirs(theirs)?;
        let Some((made, stage @ (Stage::Asked | Stage::GivenUp))) = self.connections.get_mut(&serial) else {
            return no(code::MALFORMED, format!("connection {serial} was not asked for (B-14)"));
        };
        made.theirs = theirs;
        let agreed = (*stage == Stage::Asked).then_some(*made);
        *stage = Stage::Up;
        Ok(agreed)
    }

    /// The peer refused; whether anybody waits for that. The connection is to be closed once no program has its window.
    ///
    /// # Errors
    /// It was not asked.
    pub fn refused(&mut self, serial: u32) -> Result<bool, Refusal> {
        match self.connections.get_mut(&serial) {
            Some((_, stage @ (Stage::Asked | Stage::GivenUp))) => {
                Ok(std::mem::replace(stage, Stage::Refused) == Stage::Asked)
            }
            _ => no(code::MALFORMED, format!("connection {serial} was not asked for (B-14)")),
        }
    }

    /// This side is done with a connection; whether Close is to be said.
    pub fn close(&mut self, serial: u32) -> bool {
        let Some((_, stage)) = self.connections.get_mut(&serial) else { return false };
        match *stage {
            Stage::Up => *stage = Stage::ClosedHere,
            Stage::ClosedThere => drop(self.connections.remove(&serial)),
            // Close is said to an Accept: a peer that refuses knows of no connection.
            Stage::Refused => {
                self.connections.remove(&serial);
                return false;
            }
            Stage::Asked => {
                *stage = Stage::GivenUp;
                return false;
            }
            Stage::GivenUp | Stage::ClosedHere => return false,
        }
        true
    }

    /// The connection does not come about, and the peer was not told that it does.
    pub fn forget(&mut self, serial: u32) {
        self.connections.remove(&serial);
    }

    /// The peer is done with a connection; what there was of it until then, if a program still has it.
    ///
    /// # Errors
    /// There is none.
    pub fn closed(&mut self, serial: u32) -> Result<Option<Agreement>, Refusal> {
        match self.connections.get_mut(&serial) {
            Some((_, Stage::ClosedHere)) => {
                self.connections.remove(&serial);
                Ok(None)
            }
            Some((made, stage @ Stage::Up)) => {
                *stage = Stage::ClosedThere;
                Ok(Some(*made))
            }
            _ => no(code::MALFORMED, format!("connection {serial} is not there to close (B-14)")),
        }
    }

    /// Forgets what was asked and what was said since, as the peer's broker began anew (B-18). Returns the serials that
    /// were asked for: they are refused now.
    pub fn forgotten(&mut self) -> Vec<u32> {
        let mut refused = Vec::new();
        for (serial, (_, stage)) in &mut self.connections {
            match *stage {
                Stage::Asked | Stage::GivenUp => {
                    *stage = Stage::Refused;
                    refused.push(*serial);
                }
                Stage::ClosedThere => *stage = Stage::Up,
                Stage::Refused | Stage::Up | Stage::ClosedHere => {}
            }
        }
        refused
    }

    /// Compares a connection that the peer has with this side's record of it (B-18). Fields that the peer does not know
    /// are 0.
    ///
    /// # Errors
    /// The peer's statement contradicts this side's record.
    pub fn resumed(&mut self, claim: Agreement, is_over: bool) -> Result<ResumeAction, Refusal> {
        let serial = claim.serial;
        let others = self.connections.values().filter(|(made, _)| made.serial != serial);
        let clash = |a: Range, b: Range| a.1 != 0 && b.1 != 0 && a.0 < b.0.saturating_add(b.1) && b.0 < a.0 + a.1;
        let bad = |range: Range| range.1 != 0 && !window_is_sound(self.region, range.0, range.1);
        let taken = others.into_iter().any(|(made, _)| {
            clash(made.own, claim.own)
                || clash(made.theirs, claim.theirs)
                || (made.channel == claim.channel && claim.channel != 0)
        });
        if serial == 0 || taken || bad(claim.own) || bad(claim.theirs) {
            return no(code::MALFORMED, format!("there cannot be a connection {serial} with these windows (B-18)"));
        }
        if claim.channel != 0 && !channel_is_sound(claim.channel) {
            return no(code::MALFORMED, format!("event channel {} (B-18)", claim.channel));
        }
        let Some((made, stage)) = self.connections.get_mut(&serial) else {
            if self.connections.len() >= usize::from(CONNECTIONS_MAX) {
                return no(code::MALFORMED, "there cannot be so many connections (B-18)");
            }
            if !is_over {
                self.connections.insert(serial, (claim, Stage::ClosedHere));
            }
            return Ok(ResumeAction::Lost(claim));
        };
        let agree = |known: Range, claim: Range| known.1 == 0 || claim.1 == 0 || known == claim;
        let same_channel = made.channel == 0 || claim.channel == 0 || made.channel == claim.channel;
        if !agree(made.own, claim.own) || !agree(made.theirs, claim.theirs) || !same_channel {
            return no(code::MALFORMED, format!("connection {serial} is another one (B-18)"));
        }
        let unknown = made.theirs.1 == 0;
        let known = |known: Range, claim: Range| if known.1 == 0 { claim } else { known };
        (made.own, made.theirs) = (known(made.own, claim.own), known(made.theirs, claim.theirs));
        made.channel = made.channel.max(claim.channel);
        match (*stage, is_over) {
            (Stage::Up, true) => {
                *stage = Stage::ClosedThere;
                Ok(ResumeAction::ClosedThere)
            }
            (Stage::ClosedHere, true) => {
                self.connections.remove(&serial);
                Ok(ResumeAction::Ended)
            }
            // It was accepted after all, which was not heard here.
            (Stage::Refused, over) => {
                *stage = if over { Stage::ClosedThere } else { Stage::Up };
                Ok(ResumeAction::AsItWas)
            }
            (Stage::Asked | Stage::GivenUp, _) => {
                no(code::MALFORMED, format!("connection {serial} is not agreed (B-18)"))
            }
            (Stage::Up, false) if unknown => Ok(ResumeAction::Agreed(*made)),
            _ => Ok(ResumeAction::AsItWas),
        }
    }

    fn check_theirs(&self, theirs: Range) -> Result<(), Refusal> {
        let overlaps = |(at, len): Range| at < theirs.0.saturating_add(theirs.1) && theirs.0 < at + len;
        if !window_is_sound(self.region, theirs.0, theirs.1) {
            return no(code::MALFORMED, format!("window of {:#x} bytes at {:#x} (B-14)", theirs.1, theirs.0));
        }
        if self.connections.values().any(|(made, _)| made.theirs.1 != 0 && overlaps(made.theirs)) {
            return no(code::MALFORMED, format!("window at {:#x} is that of another connection (B-14)", theirs.0));
        }
        Ok(())
    }

    fn free_channel(&self) -> Result<u16, Refusal> {
        let free = |number: &u16| {
            let channel = 1 + number * CONNECTION_CHANNELS;
            self.connections.values().all(|(made, _)| made.channel != channel)
        };
        let number =
            if self.side == 0 { (0..CONNECTIONS_MAX).find(free) } else { (0..CONNECTIONS_MAX).rev().find(free) };
        match number {
            Some(number) => Ok(1 + number * CONNECTION_CHANNELS),
            None => no(code::QUOTA, format!("the link has {CONNECTIONS_MAX} connections, the most there can be")),
        }
    }

    /// Finds free memory for a connection: an eighth of what is left, within bounds (V-8).
    fn free_range(&self) -> Result<Range, Refusal> {
        let mut taken: Vec<Range> = self.iter().map(|(made, _)| made.own).filter(|own| own.1 != 0).collect();
        taken.sort_unstable();
        taken.push((self.region, 0));
        let mut from = WINDOWS_AT;
        let mut gaps = Vec::new();
        for (at, len) in taken {
            gaps.push((from, at.saturating_sub(from)));
            from = at + len;
        }
        let left: u64 = gaps.iter().map(|gap| gap.1).sum();
        let least = self.window.min(WINDOW_MIN);
        let len = ((left / SHARE) & !(PAGE - 1)).clamp(least, self.window);
        // Where what is left is in pieces, a small window is better than none.
        for len in [len, least] {
            if let Some((at, _)) = gaps.iter().find(|gap| gap.1 >= len) {
                return Ok((*at, len));
            }
        }
        let (region, count) = (self.region, self.connections.len());
        no(
            code::QUOTA,
            format!(
                "{region} bytes of the link are used up by {count} connections: make it larger, or `window` smaller"
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGION: u64 = 1 << 20;
    const WINDOW: u64 = 64 << 10;

    fn pair() -> [Connections; 2] {
        [Connections::new(0, REGION, WINDOW), Connections::new(1, REGION, WINDOW)]
    }

    fn agree(from: &mut Connections, to: &mut Connections) -> Agreement {
        let asked = from.ask().unwrap();
        let answer = to.asked(asked.serial, asked.own, asked.channel).unwrap();
        from.accepted(asked.serial, answer.own).unwrap().unwrap()
    }

    #[test]
    fn b14_ends_that_connection_each_other_at_once_choose_different_numbers() {
        let [mut a, mut b] = pair();
        let (from_a, from_b) = (a.ask().unwrap(), b.ask().unwrap());
        assert!(from_a.serial != from_b.serial && from_a.channel != from_b.channel);
        assert!(a.asked(from_b.serial, from_b.own, from_b.channel).is_ok());
        assert!(b.asked(from_a.serial, from_a.own, from_a.channel).is_ok());
    }

    #[test]
    fn b14_window_is_used_again_once_both_sides_closed() {
        let [mut a, mut b] = pair();
        let first = agree(&mut a, &mut b);
        assert!(a.close(first.serial));
        assert!(!a.close(first.serial), "Close is said once");
        assert_ne!(agree(&mut a, &mut b).own, first.own, "the peer has not closed yet");
        assert_eq!(b.closed(first.serial).unwrap().map(|made| made.serial), Some(first.serial));
        assert!(b.close(first.serial));
        assert_eq!(a.closed(first.serial), Ok(None));
        let again = agree(&mut a, &mut b);
        assert_eq!((again.own, again.channel), (first.own, first.channel));
        assert_ne!(again.serial, first.serial);
    }

    /// What is left is shared out, so that nobody who comes early leaves nothing to those who come later.
    #[test]
    fn v8_link_of_the_default_size_holds_more_than_25_connections_the_first_with_much_memory() {
        let (region, window) = (16 << 20, 2 << 20);
        let [mut a, mut b] = [Connections::new(0, region, window), Connections::new(1, region, window)];
        let mut connections = Vec::new();
        while let Ok(asked) = a.ask() {
            let answer = b.asked(asked.serial, asked.own, asked.channel).unwrap();
            connections.push(a.accepted(asked.serial, answer.own).unwrap().unwrap());
        }
        assert_eq!(connections.len(), 33);
        assert_eq!([0, 5, 32].map(|connection| connections[connection].own.1), [2044 << 10, 1048 << 10, 72 << 10]);
        let Refusal(code, why) = a.ask().unwrap_err();
        assert!(code == code::QUOTA && why.contains("used up by 33 connections"), "{why}");
        // Where there is no gap of an eighth, the next one gets what there is for sure.
        for made in connections.into_iter().step_by(2).skip(1) {
            assert!(a.close(made.serial));
            assert!(b.closed(made.serial).unwrap().is_some() && b.close(made.serial));
            a.closed(made.serial).unwrap();
        }
        while let Ok(asked) = a.ask() {
            assert!(window_is_sound(region, asked.own.0, asked.own.1), "{asked:?}");
            let answer = b.asked(asked.serial, asked.own, asked.channel).unwrap();
            a.accepted(asked.serial, answer.own).unwrap();
        }
        assert!(a.iter().count() >= 33);
    }

    #[test]
    fn b14_what_the_peer_may_not_say_is_refused() {
        let [mut a, mut b] = pair();
        let up = agree(&mut b, &mut a);
        let sound = (WINDOWS_AT + 8 * WINDOW, WINDOW);
        for (serial, theirs, channel) in [
            (0, sound, 4),
            (3, sound, 4),
            (up.serial, sound, 4),
            (4, (0, WINDOW), 4),
            (4, (sound.0, 0), 4),
            (4, (sound.0, REGION), 4),
            (4, (u64::MAX - 4095, 8192), 4),
            (4, up.own, 4),
            (4, sound, 0),
            (4, sound, 5),
            (4, sound, 511),
            (4, sound, u16::MAX),
            (4, sound, up.channel),
        ] {
            assert!(a.asked(serial, theirs, channel).is_err(), "{serial} {theirs:?} {channel}");
        }
        assert!(a.asked(4, sound, 4).is_ok());
        let asked = a.ask().unwrap();
        assert!(a.accepted(asked.serial, (0, 1)).is_err());
        assert!(a.accepted(asked.serial, sound).is_err(), "it is another connection's");
        assert!(a.accepted(9, (WINDOWS_AT + 12 * WINDOW, WINDOW)).is_err());
        for serial in [9, asked.serial] {
            assert!(a.closed(serial).is_err(), "{serial}");
        }
        assert!(a.refused(up.serial).is_err());
    }

    #[test]
    fn b17_connections_are_bounded_by_memory_and_by_event_channels() {
        let [mut a, mut b] = pair();
        for _ in 0..15 {
            agree(&mut a, &mut b);
        }
        assert_eq!(a.ask().unwrap_err().0, code::QUOTA);
        let (mut a, mut b) = (Connections::new(0, 1 << 30, 4096), Connections::new(1, 1 << 30, 4096));
        for turn in 0..CONNECTIONS_MAX {
            if turn % 2 == 0 {
                agree(&mut a, &mut b)
            } else {
                agree(&mut b, &mut a)
            };
        }
        assert_eq!([a.ask().unwrap_err().0, b.ask().unwrap_err().0], [code::QUOTA; 2]);
    }

    #[test]
    fn b14_one_user_cannot_take_all_connections_of_a_link() {
        let mut connections = Connections::new(0, 1 << 30, 4096);
        let ask = |connections: &mut Connections, user| -> Result<u32, Refusal> {
            connections.room_for(user)?;
            let serial = connections.ask()?.serial;
            connections.belongs(serial, user);
            Ok(serial)
        };
        let greedy: Vec<u32> = std::iter::from_fn(|| ask(&mut connections, 1000).ok()).collect();
        assert_eq!(greedy.len(), CONNECTIONS_OF_ONE);
        assert_eq!(ask(&mut connections, 1000).unwrap_err().0, code::QUOTA);
        assert!(ask(&mut connections, 1001).is_ok() && ask(&mut connections, 0).is_ok());
        connections.forget(greedy[0]);
        assert!(ask(&mut connections, 1000).is_ok());
    }

    #[test]
    fn b18_connection_that_was_accepted_unheard_ends_with_its_program() {
        for over in [false, true] {
            let (mut connections, theirs) = (Connections::new(0, REGION, WINDOW), (WINDOWS_AT, WINDOW));
            let asked = connections.ask().unwrap();
            assert_eq!(connections.forgotten(), [asked.serial]);
            assert_ne!(connections.ask().unwrap().own, asked.own, "its program may have it still");
            let claim = Agreement { theirs, ..asked };
            assert_eq!(connections.resumed(claim, over), Ok(ResumeAction::AsItWas));
            assert!(connections.close(asked.serial), "Close is said: the peer has it");
            assert_eq!(connections.get(asked.serial).is_some(), !over);
        }
        // A broker that begins has a connection of which its own window alone is known, and learns the rest.
        let mut connections = Connections::new(0, REGION, WINDOW);
        let whole = Agreement { serial: 1, own: (WINDOWS_AT, WINDOW), theirs: (WINDOWS_AT, WINDOW), channel: 1 };
        connections.restore(Agreement { theirs: (0, 0), ..whole });
        assert_eq!(connections.resumed(whole, false), Ok(ResumeAction::Agreed(whole)));
        assert_eq!(connections.resumed(whole, false), Ok(ResumeAction::AsItWas));
    }

    #[test]
    fn b14_connection_given_up_before_its_answer_ends_with_it() {
        let [mut a, mut b] = pair();
        let asked = a.ask().unwrap();
        assert!(!a.close(asked.serial));
        let answer = b.asked(asked.serial, asked.own, asked.channel).unwrap();
        assert_eq!(a.accepted(asked.serial, answer.own), Ok(None));
        assert!(a.close(asked.serial));
        assert!(b.closed(asked.serial).unwrap().is_some());
        assert!(b.close(asked.serial));
        assert_eq!(a.closed(asked.serial), Ok(None));
        assert_eq!(a.iter().count() + b.iter().count(), 0);
    }
}
