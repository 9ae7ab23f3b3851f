// SPDX-License-Identifier: Apache-2.0 OR MIT
//! C-2 to C-7, C-11. Reaching a listener, and the handshake of both sides.

use std::{collections::BTreeMap, sync::Arc, thread, time::Duration};

use rustix::event::{PollFd, PollFlags, poll};
use tombolo_domain::{Deadline, Error as DomainError, Link, Offer, Received, Rendezvous, Slot};
use tombolo_layout::{
    Features, SegmentHeader, VERSION,
    handshake::{Greeting, Message, Refusal},
};
use tombolo_mem::PeerSegment;
use tombolo_ring::{Fresh, Halves, Mode, Ordering, halves};

use crate::{
    Address, Error, Listener, Options, Result,
    end::{Agreement, End},
    os,
    receiving::Receiving,
    sending::Sending,
    waiter::Waiter,
};

/// First pause between two knocks at a door where nobody listens yet, and the longest.
const KNOCK: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

/// The backends a program knows, by the scheme of their addresses.
#[derive(Clone, Default, Debug)]
pub struct Backends(BTreeMap<&'static str, Arc<dyn Rendezvous>>);

/// What a channel carries: a stream of bytes ([`Stream`](crate::Stream)) or messages ([`Messages`](crate::Messages)).
/// Sealed: there are these two.
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

impl Backends {
    /// None.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// These and one more.
    #[must_use]
    pub fn with(mut self, backend: impl Rendezvous + 'static) -> Self {
        self.0.insert(backend.scheme(), Arc::new(backend));
        self
    }

    fn of(&self, address: &Address) -> Result<&Arc<dyn Rendezvous>> {
        self.0.get(address.scheme()).ok_or_else(|| Error::UnknownScheme {
            scheme: address.scheme().into(),
            known: self.0.keys().copied().collect::<Vec<_>>().join(", "),
        })
    }

    /// Reaches the listener at `address` and agrees with it on a channel.
    ///
    /// # Blocking
    /// Until the listener has answered, at most for the [handshake's timeout](Options::handshake_timeout); if nobody
    /// listens yet, as long as [`Options::wait_for_listener`] says.
    ///
    /// # Errors
    /// What the backend says ([`Error::Domain`]); [`Error::Refused`] and [`Error::VersionMismatch`] where the listener
    /// does not agree; [`Error::TimedOut`].
    pub fn connect<C: Channel>(&self, address: &Address, options: &Options) -> Result<C> {
        let backend = self.of(address)?;
        let patience = Deadline::after(options.connect_timeout.unwrap_or_default());
        let mut pause = KNOCK.0;
        let link = loop {
            let deadline = Deadline::after(options.handshake_timeout);
            match backend.connect(address.service(), deadline) {
                Err(DomainError::NotFound(_)) if !patience.expired() => {
                    thread::park_timeout(pause.min(patience.remaining().unwrap_or(pause)));
                    pause = (pause * 2).min(KNOCK.1);
                }
                other => break other?,
            }
        };
        introduce(link, C::MESSAGES, options).map(C::from_halves)
    }

    /// Begins to listen at `address`.
    ///
    /// # Errors
    /// What the backend says: [`Error::Domain`].
    pub fn listen<C: Channel>(&self, address: &Address, options: &Options) -> Result<Listener<C>> {
        Listener::new(self.of(address)?.listen(address.service())?, options.clone())
    }
}

/// This end's segment, made for one peer.
struct Introduction {
    own: Fresh,
    offer: Offer,
    greeting: Greeting,
}

impl Introduction {
    fn new(link: &mut dyn Link, messages: bool, options: &Options) -> Result<Self> {
        let mut offered = Features::HANDOVER;
        if messages {
            offered = offered.or(Features::MESSAGES);
        }
        if options.barrier && link.same_kernel() && os::membarrier_registered() {
            offered = offered.or(Features::MEMBARRIER);
        }
        let epoch = os::epoch();
        let header = SegmentHeader::new(options.capacity, 0, 0, offered, epoch);
        let (segment, offer) = link.allocate(header.segment_len as usize)?;
        let greeting = Greeting {
            version_min: VERSION,
            version_max: VERSION,
            offered,
            required: if messages { Features::MESSAGES } else { Features::NONE },
            epoch,
            map_limit: options.map_limit,
        };
        Ok(Self { own: Fresh::new(segment, &header), offer, greeting })
    }
}

/// The connecting side of the handshake.
fn introduce(mut link: Box<dyn Link>, messages: bool, options: &Options) -> Result<Parts> {
    let introduction = Introduction::new(&mut *link, messages, options)?;
    link.send(&Message::Hello(introduction.greeting).encode(), Some(&introduction.offer))?;
    let deadline = Deadline::after(options.handshake_timeout);
    let received = loop {
        match link.recv(options.map_limit)? {
            Some(received) => break received,
            None => await_readable(&*link, deadline)?,
        }
    };
    match Message::decode(&received.message)? {
        Message::Welcome(theirs) => {
            check_versions(&theirs)?;
            join(link, introduction, &theirs, received.segment, messages, options)
        }
        Message::Refuse(Refusal::Version, reason) => Err(version_mismatch(&reason)),
        Message::Refuse(code, reason) => Err(Error::Refused { code, reason }),
        _ => Err(Error::Malformed { clause: "C-3", what: "another answer than welcome or refusal".into() }),
    }
}

/// The listening side: what came in from a peer that knocked, and the answer to it.
pub(crate) fn answer(mut link: Box<dyn Link>, received: Received, messages: bool, options: &Options) -> Result<Parts> {
    let agreed = hear(&received, messages, options).and_then(|theirs| {
        let introduction = Introduction::new(&mut *link, messages, options)?;
        Ok((theirs, introduction))
    });
    match agreed {
        Ok((theirs, introduction)) => {
            link.send(&Message::Welcome(introduction.greeting).encode(), Some(&introduction.offer))?;
            join(link, introduction, &theirs, received.segment, messages, options)
        }
        Err(error) => {
            // The peer learns why; whether that reaches it is its own business.
            let _ = link.send(&refusal(&error).encode(), None);
            Err(error)
        }
    }
}

/// Whether a peer's greeting is one to agree with.
fn hear(received: &Received, messages: bool, options: &Options) -> Result<Greeting> {
    let Message::Hello(theirs) = Message::decode(&received.message)? else {
        return Err(Error::Malformed { clause: "C-3", what: "the first message is no greeting".into() });
    };
    check_versions(&theirs)?;
    let here = if messages { Features::KNOWN } else { Features::KNOWN.without(Features::MESSAGES) };
    let missing = theirs.required.without(here);
    if !missing.is_empty() {
        let reason = if missing == Features::MESSAGES {
            "the listener expects a stream, not messages".into()
        } else {
            format!("features {:#x} are required and not offered", missing.0)
        };
        return Err(Error::Refused { code: Refusal::Feature, reason });
    }
    if messages && !theirs.offered.has(Features::MESSAGES) {
        let reason = "the listener expects messages, not a stream".into();
        return Err(Error::Refused { code: Refusal::Feature, reason });
    }
    let own_len = tombolo_layout::limits::CONTROL_LEN + options.capacity;
    if own_len > theirs.map_limit {
        let reason = format!("the listener's segment has {own_len} bytes, the peer maps at most {}", theirs.map_limit);
        return Err(Error::Refused { code: Refusal::Segment, reason });
    }
    Ok(theirs)
}

fn check_versions(theirs: &Greeting) -> Result<()> {
    if (theirs.version_min..=theirs.version_max).contains(&VERSION) {
        return Ok(());
    }
    let (theirs_min, theirs_max) = (theirs.version_min, theirs.version_max);
    Err(Error::VersionMismatch { ours: VERSION, theirs_min, theirs_max })
}

/// C-5. The refusal that tells the peer about `error`; for versions the reason is the range, so that the peer can name
/// both.
fn refusal(error: &Error) -> Message {
    match error {
        Error::VersionMismatch { .. } => Message::Refuse(Refusal::Version, format!("{VERSION}-{VERSION}")),
        Error::Refused { code, reason } => Message::Refuse(*code, reason.clone()),
        Error::Domain(DomainError::Limit { what, .. }) => Message::Refuse(Refusal::Quota, (*what).into()),
        other => Message::Refuse(Refusal::Malformed, other.to_string()),
    }
}

fn version_mismatch(range: &str) -> Error {
    let bounds = range.split_once('-').and_then(|(min, max)| Some((min.parse().ok()?, max.parse().ok()?)));
    let (theirs_min, theirs_max) = bounds.unwrap_or((0, 0));
    Error::VersionMismatch { ours: VERSION, theirs_min, theirs_max }
}

/// Two ends that agree become a channel.
fn join(
    link: Box<dyn Link>,
    introduction: Introduction,
    theirs: &Greeting,
    segment: Option<PeerSegment>,
    messages: bool,
    options: &Options,
) -> Result<Parts> {
    let Introduction { own, offer, greeting } = introduction;
    let segment =
        segment.ok_or_else(|| Error::Malformed { clause: "C-3", what: "a greeting without a segment".into() })?;
    let features = greeting.offered.and(theirs.offered);
    if messages != features.has(Features::MESSAGES) {
        return Err(Error::Malformed { clause: "C-4", what: "the peer agreed and then did not".into() });
    }
    let barrier = features.has(Features::MEMBARRIER) && link.same_kernel();
    let ordering = if barrier { Ordering::SleeperBarrier } else { Ordering::Fences };
    let (halves, header) = halves(own, &segment, Mode { messages, ordering })?;
    if header.epoch != theirs.epoch {
        let what = format!("segment of epoch {:#x} in a greeting of epoch {:#x}", header.epoch, theirs.epoch);
        return Err(Error::Malformed { clause: "C-11", what });
    }
    let bell =
        link.doorbell().ok_or(Error::Malformed { clause: "C-3", what: "a greeting without a doorbell".into() })?;
    let Halves { mut writer, reader, own_cpu, peer_cpu } = halves;
    writer.set_flush_policy(options.flush);
    let agreed = Agreement {
        features,
        own_epoch: greeting.epoch,
        peer_epoch: theirs.epoch,
        own_map_limit: options.map_limit,
        peer_map_limit: theirs.map_limit,
    };
    let end = Arc::new(End::new(link, offer, (own_cpu, peer_cpu), agreed));
    let waiter = |slot| Waiter::new(Arc::clone(&bell), slot, Arc::clone(&end), options.spin);
    Ok(Parts {
        sending: Sending::new(writer, waiter(Slot::Space)),
        receiving: Receiving::new(reader, waiter(Slot::Data)),
    })
}

/// Waits until the link has something to say.
fn await_readable(link: &dyn Link, deadline: Deadline) -> Result<()> {
    let fd = link.fd();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll_until(&mut fds, deadline)
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
