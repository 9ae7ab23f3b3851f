// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reaching a listener, and the handshake of both sides (C-2 to C-7, C-11).

use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use tombolo_domain::{Deadline, Endpoint, Error as DomainError, Liveness, Offer, Received, Slot};
use tombolo_growth::{Growth, GrowthRule};
use tombolo_layout::{
    Features, SegmentHeader, VERSION,
    handshake::{Greeting, Message, Refusal},
    limits,
};
use tombolo_mem::PeerSegment;
use tombolo_os::clock::coarse_time;
use tombolo_ring::{FenceMode, Fresh, Halves, Mode, halves};

use crate::{
    Error, Options, Result, RingBudget, RingChoice,
    control::{refused, without_doorbell},
    end::{Agreement, End},
    moves::RingMoves,
    os,
    receiving::Receiving,
    sending::Sending,
    waiter::Waiter,
};

/// A kind of channel: [`Stream`](crate::Stream) or [`Messages`](crate::Messages). Sealed: there are these two.
///
/// # Example
/// ```
/// use tombolo::{Channel, Options};
///
/// fn connect_patiently<C: Channel>(address: &str) -> tombolo::Result<C> {
///     tombolo::connect_with(address, &Options::new().wait_for_listener(std::time::Duration::from_secs(60)))
/// }
/// # let _ = connect_patiently::<tombolo::Messages>;
/// ```
pub trait Channel: sealed::Sealed + Sized {}

pub(crate) mod sealed {
    use super::{Receiving, Sending};

    pub trait Sealed {
        const MESSAGES: bool;
        #[doc(hidden)]
        fn from_halves(parts: Parts) -> Self;
    }

    /// Both halves of a fresh end.
    pub struct Parts {
        pub(crate) sending: Sending,
        pub(crate) receiving: Receiving,
    }
}

pub(crate) use sealed::Parts;

/// Where both are in force a writer may go on in a ring that its reader has not taken yet (H-9).
const GOES_AHEAD: Features = Features::HANDOVER.or(Features::AHEAD);

/// What this endpoint offers a peer on `link`.
fn offered(link: &dyn Endpoint, messages: bool, options: &Options) -> Features {
    let mut offered = Features::HANDOVER.or(Features::STATISTICS);
    if messages {
        offered = offered.or(Features::MESSAGES);
    }
    if !messages && can_go_ahead(link) {
        offered = offered.or(Features::AHEAD);
    }
    if options.barrier && link.same_kernel() && os::membarrier_registered() {
        offered = offered.or(Features::MEMBARRIER);
    }
    offered
}

/// Whether a writer on `link` can go on in a ring that its reader has not taken yet (H-9): taking it costs the reader
/// nothing that may be used up, and it can do so when the writer is gone.
fn can_go_ahead(link: &dyn Endpoint) -> bool {
    link.same_kernel() && link.outlives_owner()
}

/// Whether a connecting endpoint asks for no channel but one whose writers go ahead. It makes its small first ring
/// before it knows its peer, and only so there is more room than that for whoever counts on it (C-4).
pub(crate) fn requires_ahead(link: &dyn Endpoint, messages: bool, options: &Options) -> bool {
    !messages && options.growth.is_some() && can_go_ahead(link)
}

/// What is in force between endpoints that offer `ours` and `theirs` (C-4).
fn in_force(ours: Features, theirs: Features) -> Features {
    let both = ours.and(theirs);
    let goes_ahead = [ours, theirs].iter().all(|offered| offered.has(GOES_AHEAD) && !offered.has(Features::MESSAGES));
    if goes_ahead { both } else { both.without(Features::AHEAD) }
}

/// What an endpoint requires that is there for messages, or for a stream.
fn required(messages: bool) -> Features {
    if messages { Features::MESSAGES } else { Features::NONE }
}

/// The largest segment that this endpoint maps for a peer on `link` (C-2). Other backends do not depend on what the
/// kernel counts.
fn map_limit(link: &dyn Endpoint, options: &Options) -> u64 {
    options.map_limit(!link.same_kernel() || tombolo_mem::counts_pages())
}

/// What this endpoint's first ring holds: what was asked for, else what the backend can afford, up to the
/// default (X-10).
fn first_capacity(link: &dyn Endpoint, messages: bool, options: &Options) -> u64 {
    options.first_ring(messages).unwrap_or_else(|| {
        let whole = (limits::CONTROL_LEN + limits::CAPACITY_DEFAULT) as usize;
        let affordable = (link.affordable(whole) as u64).saturating_sub(limits::CONTROL_LEN);
        // The power of two below.
        let capacity = affordable.checked_ilog2().map_or(0, |bits| 1 << bits);
        capacity.max(limits::CAPACITY_MIN)
    })
}

/// This endpoint's segment, made for one peer, and what goes with it.
struct Introduction {
    own: Fresh,
    offer: Offer,
    greeting: Greeting,
}

/// Two endpoints that agree, before the link is theirs.
struct Agreed {
    halves: Halves,
    offer: Offer,
    agreement: Agreement,
}

impl Introduction {
    fn new(link: &mut dyn Endpoint, messages: bool, required: Features, options: &Options) -> Result<Self> {
        let offered = offered(link, messages, options);
        let epoch = os::epoch();
        let mut capacity = first_capacity(link, messages, options);
        let (header, segment, offer) = loop {
            let header = SegmentHeader::new(capacity, 0, 0, offered, epoch);
            match link.allocate(header.segment_len as usize) {
                Ok((segment, offer)) => break (header, segment, offer),
                // Nobody asked for just this size, and others may have taken what there was.
                Err(DomainError::Limit { .. }) if options.capacity.is_none() && capacity > limits::CAPACITY_MIN => {
                    capacity /= 2;
                }
                Err(error) => return Err(error.into()),
            }
        };
        let greeting = Greeting {
            version_min: VERSION,
            version_max: VERSION,
            offered,
            required,
            epoch,
            map_limit: map_limit(link, options),
        };
        Ok(Self { own: Fresh::new(segment, &header), offer, greeting })
    }

    /// Checks the segment that came with a greeting and joins both into two pipes (C-3).
    fn meet(self, theirs: &Greeting, segment: &PeerSegment, listened: bool) -> Result<Agreed> {
        let Self { own, offer, greeting } = self;
        let features = in_force(greeting.offered, theirs.offered);
        let ordering = if features.has(Features::MEMBARRIER) { FenceMode::WaiterBarrier } else { FenceMode::Fences };
        let messages = features.has(Features::MESSAGES);
        let (halves, header) =
            halves(own, segment, Mode { messages, ordering }).map_err(|corrupt| Error::in_segment(corrupt, segment))?;
        if header.epoch != theirs.epoch || theirs.epoch == 0 {
            let what = format!("segment of epoch {:#x} in a greeting of epoch {:#x}", header.epoch, theirs.epoch);
            return Err(Error::Malformed { clause: "C-11", what });
        }
        if theirs.epoch == greeting.epoch {
            return Err(Error::Malformed { clause: "C-11", what: "this end's own epoch came back".into() });
        }
        let agreement = Agreement {
            features,
            own_epoch: greeting.epoch,
            peer_epoch: theirs.epoch,
            own_map_limit: greeting.map_limit,
            peer_map_limit: theirs.map_limit,
            listened,
        };
        Ok(Agreed { halves, offer, agreement })
    }
}

impl Agreed {
    /// The two endpoints become a channel.
    fn join(self, link: Box<dyn Endpoint>, options: &Options) -> Result<Parts> {
        let Self { halves, offer, agreement } = self;
        let Halves { mut writer, mut reader, own_cpu, peer_cpu, boards, growth: board } = halves;
        let doorbell =
            link.doorbell().ok_or(Error::Malformed { clause: "C-3", what: "a greeting without a doorbell".into() })?;
        writer.set_flush_policy(options.flush);
        let goes_ahead = agreement.features.has(GOES_AHEAD);
        if goes_ahead {
            reader.handover().allow_ahead();
        }
        let growth = growth(&*link, writer.capacity(), &agreement, options);
        writer.handover().keep_message_max(growth.is_some());
        // To try a ring is no reason to make room.
        let goes_ahead = goes_ahead && options.growth.is_some();
        let end = Arc::new(End::new(link, offer, (own_cpu, peer_cpu), agreement));
        let spin = options.spin.unwrap_or_else(|| doorbell.worth_spinning());
        let waiter = |slot, board| Waiter::new(Arc::clone(&doorbell), slot, Arc::clone(&end), spin, board);
        let (sending, receiving) = boards.unzip();
        Ok(Parts {
            sending: Sending::new(writer, waiter(Slot::Space, sending), RingMoves::new(growth, goes_ahead, board)),
            receiving: Receiving::new(reader, waiter(Slot::Data, receiving)),
        })
    }
}

/// How the ring of `capacity` bytes that this endpoint writes follows its load.
fn growth(link: &dyn Endpoint, capacity: u64, agreement: &Agreement, options: &Options) -> Option<Growth> {
    let messages = agreement.features.has(Features::MESSAGES);
    let follows = agreement.features.has(Features::HANDOVER);
    let peer_maps = if follows { agreement.peer_map_limit } else { 0 };
    let of = |rule, budget: &RingBudget, most| {
        let rule = GrowthRule { idle: options.idle_time, ..rule };
        Growth::new(rule, budget.clone(), most, peer_maps, coarse_time())
    };
    let tried = RingChoice::of_this_machine().tried();
    match &options.growth {
        // It bounds their length.
        Some(_) if messages => None,
        Some(budget) => Some(of(GrowthRule::STREAM, budget, options.growth_target())),
        // Nobody said how large it is to be, and it costs nothing that others may lack.
        None if options.capacity.is_none() && follows && can_go_ahead(link) && tried > capacity => {
            let fixed = of(GrowthRule::fixed(capacity), &RingBudget::new(0), capacity);
            Some(fixed.trying(tried, RingChoice::trial_budget().clone()))
        }
        None => None,
    }
}

/// The connecting side of the handshake.
pub(crate) fn introduce(mut link: Box<dyn Endpoint>, messages: bool, options: &Options) -> Result<Parts> {
    let required = if requires_ahead(&*link, messages, options) { GOES_AHEAD } else { required(messages) };
    let introduction = Introduction::new(&mut *link, messages, required, options)?;
    link.send(&Message::Hello(introduction.greeting).encode(), Some(&introduction.offer))?;
    let deadline = Deadline::after(options.handshake_timeout);
    let received = loop {
        match link.recv(introduction.greeting.map_limit).transpose() {
            Some(received) => break without_doorbell(&mut *link, received),
            None => await_readable(&*link, deadline)?,
        }
    };
    let agreed = received.map_err(Error::from).and_then(|Received { message, segment }| {
        let theirs = match Message::decode(&message)? {
            Message::Welcome(theirs) => theirs,
            Message::Refuse(..) if segment.is_some() => {
                return Err(Error::Malformed { clause: "C-2", what: "a refusal with a segment".into() });
            }
            // Whoever was refused has nothing to answer.
            Message::Refuse(code, reason) => return Ok(Err(refused(code, reason, &message))),
            _ => return Err(Error::Malformed { clause: "C-3", what: "another answer than welcome or refusal".into() }),
        };
        let segment = check(&theirs, segment, introduction.greeting.offered, messages)?;
        if !theirs.offered.has(required) {
            let what = format!("a welcome that does not offer features {:#x}, which were required", required.0);
            return Err(Error::Malformed { clause: "C-4", what });
        }
        introduction.meet(&theirs, &segment, false).map(Ok)
    });
    match agreed {
        Ok(Ok(agreed)) => agreed.join(link, options),
        Ok(Err(refused)) => Err(refused),
        Err(error) => Err(refuse(&mut *link, error)),
    }
}

/// The listening side: what came in from a peer that knocked, and the answer to it.
pub(crate) fn answer(
    mut link: Box<dyn Endpoint>,
    received: std::result::Result<Received, DomainError>,
    messages: bool,
    options: &Options,
) -> Result<Parts> {
    let received = without_doorbell(&mut *link, received);
    let agreed = received.map_err(Error::from).and_then(|Received { message, segment }| {
        let Message::Hello(theirs) = Message::decode(&message)? else {
            return Err(Error::Malformed { clause: "C-3", what: "the first message is no greeting".into() });
        };
        let segment = check(&theirs, segment, offered(&*link, messages, options), messages)?;
        let own_len = limits::CONTROL_LEN + first_capacity(&*link, messages, options);
        if own_len > theirs.map_limit {
            let limit = theirs.map_limit;
            let reason = format!("the listener's segment has {own_len} bytes, the peer maps at most {limit}");
            return Err(Error::Refused { code: Refusal::Segment, reason });
        }
        let introduction = Introduction::new(&mut *link, messages, required(messages), options)?;
        let welcome = Message::Welcome(introduction.greeting).encode();
        Ok((welcome, introduction.meet(&theirs, &segment, true)?))
    });
    match agreed {
        Ok((welcome, agreed)) => {
            link.send(&welcome, Some(&agreed.offer))?;
            agreed.join(link, options)
        }
        Err(error) => Err(refuse(&mut *link, error)),
    }
}

/// Whether a peer's greeting is one to agree with; if so, the segment that came with it (C-2, C-4, C-6).
fn check(theirs: &Greeting, segment: Option<PeerSegment>, offered: Features, messages: bool) -> Result<PeerSegment> {
    let segment =
        segment.ok_or_else(|| Error::Malformed { clause: "C-2", what: "a greeting without a segment".into() })?;
    // The newest version is the one spoken now, and its segment's: one that starts from another is told what to say
    // instead.
    if theirs.version_max != VERSION || theirs.version_min > theirs.version_max {
        let (theirs_min, theirs_max) = (theirs.version_min, theirs.version_max);
        return Err(Error::VersionMismatch { ours: VERSION, theirs_min, theirs_max });
    }
    let missing = theirs.required.without(offered);
    let what = if missing.has(Features::MESSAGES) {
        "the refusing end expects a stream, not messages".into()
    } else if !missing.is_empty() {
        format!("features {:#x} are required and not offered", missing.0)
    } else if messages && !theirs.offered.has(Features::MESSAGES) {
        "the refusing end expects messages, not a stream".into()
    } else {
        return Ok(segment);
    };
    Err(Error::Malformed { clause: "C-4", what })
}

/// Tells the peer about `error`; whether that reaches it is its own business (C-5). The versions that this endpoint
/// speaks stand in every message; as a reason they are for people.
fn refuse(link: &mut dyn Endpoint, error: Error) -> Error {
    let (code, reason) = match &error {
        Error::VersionMismatch { .. } => (Refusal::Version, format!("{VERSION}-{VERSION}")),
        Error::Refused { code, reason } => (*code, reason.clone()),
        Error::Domain(DomainError::Limit { what, .. }) => (Refusal::Quota, format!("used up: {what}")),
        Error::Domain(error @ DomainError::Quota(_)) => (Refusal::Quota, error.to_string()),
        Error::Malformed { clause: "C-4", what } => (Refusal::Feature, what.clone()),
        // A fault of the segment is L-6, and has a code of its own.
        Error::Malformed { clause: clause @ ("L-4" | "L-5" | "L-7"), what } => {
            (Refusal::Malformed, format!("{clause}: {what}"))
        }
        Error::Malformed { clause, what } if clause.starts_with("C-") => (Refusal::Malformed, what.clone()),
        // What a backend or a ring finds wrong is the segment.
        Error::Malformed { .. } | Error::Corrupt(_) => (Refusal::Segment, error.to_string()),
        other => (Refusal::Unknown, other.to_string()),
    };
    let _ = link.send(&Message::Refuse(code, reason).encode(), None);
    error
}

/// Waits until the link has something to say.
fn await_readable(link: &dyn Endpoint, deadline: Deadline) -> Result<()> {
    let fd = link.fd();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll_until(&mut fds, deadline).map_err(|error| match error {
        Error::TimedOut if link.liveness() == Liveness::Paused => {
            let why = format!("timed out, as the peer {} is paused", link.peer().domain);
            DomainError::os("connect", std::io::Error::new(std::io::ErrorKind::TimedOut, why)).into()
        }
        error => error,
    })
}

/// Polls until one of `fds` is ready; an interruption is no end.
pub(crate) fn poll_until(fds: &mut [PollFd<'_>], deadline: Deadline) -> Result<()> {
    loop {
        let timeout = deadline.remaining().and_then(|left| left.try_into().ok());
        match poll(fds, timeout.as_ref()) {
            Ok(0) if deadline.expired() => return Err(Error::TimedOut),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(DomainError::os("poll", error).into()),
        }
    }
}
