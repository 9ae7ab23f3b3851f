// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages: a head, and the fields of their kind (B-1, B-2).

use crate::{
    field::{Fault, Field, chunk},
    text::{Line, Name, Pattern, Place, Reason},
};

/// First four bytes of every message (B-1).
pub const MAGIC: [u8; 4] = *b"TMBK";
/// Bytes of the head (B-1).
pub const HEAD_LEN: usize = 16;
/// Longest message (B-1).
pub const MESSAGE_MAX: usize = 1024;

/// Between whom a message goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Path {
    /// The host's broker and a guest's.
    Host = 1,
    /// The brokers at two ends of a link.
    Link = 2,
    /// A broker and a program of its own kernel.
    Socket = 4,
}

/// The head taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// Which message (B-2).
    pub kind: u16,
    /// Bytes of the body.
    pub len: u16,
    /// Which question it asks or answers; 0 for a statement.
    pub serial: u32,
}

impl Head {
    /// Takes a message apart into its head and its body.
    ///
    /// # Errors
    /// It breaks B-1.
    pub fn decode(bytes: &[u8]) -> Result<(Self, &[u8]), Fault> {
        let bad = |what| Err(Fault::new("B-1", what));
        if bytes.len() > MESSAGE_MAX {
            return bad("message is too long");
        }
        let Some((head, body)) = bytes.split_first_chunk::<HEAD_LEN>() else {
            return bad("message is shorter than its head");
        };
        if head[..4] != MAGIC {
            return bad("message does not begin with the magic");
        }
        if head[12..] != [0; 4] {
            return bad("reserved bytes of a message are not zero");
        }
        let head = Self {
            kind: u16::from_le_bytes([head[4], head[5]]),
            len: u16::from_le_bytes([head[6], head[7]]),
            serial: u32::from_le_bytes([head[8], head[9], head[10], head[11]]),
        };
        if usize::from(head.len) != body.len() {
            return bad("message is not as long as its head says");
        }
        Ok((head, body))
    }
}

/// A message and the question that it belongs to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Envelope {
    /// Which question it asks or answers; 0 for a statement.
    pub serial: u32,
    /// What it says.
    pub message: Message,
}

impl Envelope {
    /// A message that nobody answers.
    #[must_use]
    pub fn statement(message: Message) -> Self {
        Self { serial: 0, message }
    }

    /// The bytes to send, at most [`MESSAGE_MAX`].
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        self.message.put_body(&mut body);
        let mut bytes = MAGIC.to_vec();
        self.message.kind().encode_into(&mut bytes);
        (body.len() as u16).encode_into(&mut bytes);
        self.serial.encode_into(&mut bytes);
        0u32.encode_into(&mut bytes);
        bytes.extend(body);
        bytes
    }

    /// Takes a message that came by `path` apart.
    ///
    /// # Errors
    /// The first clause that it breaks.
    pub fn decode(path: Path, bytes: &[u8]) -> Result<Self, Fault> {
        let (head, mut body) = Head::decode(bytes)?;
        let message = Message::take_body(path, head.kind, &mut body)?;
        if !body.is_empty() {
            return Err(Fault::new("B-2", "body is longer than its fields"));
        }
        Ok(Self { serial: head.serial, message })
    }
}

macro_rules! messages {
    ($($(#[$doc:meta])* $kind:literal $name:ident ($($path:ident)*) { $($(#[$note:meta])* $field:ident: $type:ty,)* })*) => {
        /// What is said (B-2).
        #[derive(Clone, PartialEq, Eq, Debug)]
        pub enum Message {
            $($(#[$doc])* $name { $($(#[$note])* $field: $type,)* },)*
        }

        impl Message {
            /// Its number (B-2).
            #[must_use]
            pub const fn kind(&self) -> u16 {
                match self {
                    $(Self::$name { .. } => $kind,)*
                }
            }

            fn put_body(&self, body: &mut Vec<u8>) {
                match self {
                    $(Self::$name { $($field,)* } => { $(Field::encode_into($field, body);)* })*
                }
            }

            fn take_body(path: Path, kind: u16, _body: &mut &[u8]) -> Result<Self, Fault> {
                match kind {
                    $($kind => {
                        if ![$(Path::$path),*].contains(&path) {
                            return Err(Fault::new("B-1", "message of this kind does not belong here"));
                        }
                        Ok(Self::$name { $($field: Field::decode_from(_body)?,)* })
                    })*
                    _ => Err(Fault::new("B-1", "message of unknown kind")),
                }
            }
        }
    };
}

messages! {
    /// Who speaks (B-6).
    1 Hello (Host Link Socket) {
        /// Oldest version that the sender speaks.
        version_min: u16,
        /// Newest one.
        version_max: u16,
        /// The epoch of the sender's box; 0 on a socket.
        epoch: u64,
        /// The same for as long as the sender's kernel runs.
        boot: [u8; 16],
        /// The sender's domain, or what the program calls itself.
        name: Name,
    }
    /// A link that this domain has (B-7).
    2 Link (Host) {
        /// Which.
        link: u32,
        /// Whose memory: another number is other memory.
        generation: u32,
        /// The domain on the other side.
        peer: Name,
        /// Where the region is that this domain writes.
        own: Place,
        /// Where the peer's region is.
        theirs: Place,
        /// Bytes of each.
        size: u64,
        /// What to ring (B-8).
        doorbell: u16,
        /// Vectors that the peer's device has.
        vectors: u16,
        /// Which of the two endpoints this one is.
        side: u8,
        /// How many Allow follow.
        allows: u16,
    }
    /// A rule for a link (B-7, B-13).
    3 Allow (Host) {
        /// Which link.
        link: u32,
        /// Who connects to whom.
        way: Way,
        /// To which services.
        service: Pattern,
    }
    /// The link goes: let go of its memory (B-7).
    4 Unlink (Host) {
        /// Which.
        link: u32,
        /// Which memory.
        generation: u32,
    }
    /// This domain has let go (B-11).
    5 Released (Host) {
        /// Of which link.
        link: u32,
        /// Of which memory.
        generation: u32,
    }
    /// How the peer fares (B-12).
    6 Life (Host Socket) {
        /// On which link.
        link: u32,
        /// In which generation.
        generation: u32,
        /// What QEMU says.
        life: Life,
    }
    /// The number of the peer's doorbell is another one now (B-8).
    7 Bell (Host) {
        /// On which link.
        link: u32,
        /// The number, or [`NO_DOORBELL`](crate::NO_DOORBELL).
        doorbell: u16,
    }
    /// This domain's peer rings without end: take its doorbell away (B-8).
    8 Storm (Host) {
        /// On which link.
        link: u32,
    }
    /// What this domain is called (B-6).
    9 You (Host) {
        /// By the host, and by all others.
        name: Name,
    }
    /// The number that the configuration gave a domain (B-19).
    10 Number (Host Socket) {
        /// Its name.
        name: Name,
        /// The number, or [`NO_NUMBER`](crate::NO_NUMBER).
        number: u16,
    }
    /// This domain has opened a link: how much of it is in use (B-7).
    11 Usage (Host) {
        /// Which.
        link: u32,
        /// Which memory.
        generation: u32,
        /// Connections on it.
        connections: u16,
        /// Bytes of this domain's region that they have.
        used: u64,
    }
    /// The link will be taken away: programs are to end what they have on it (B-21).
    12 Leave (Host Socket) {
        /// Which.
        link: u32,
        /// Which memory.
        generation: u32,
        /// For how many milliseconds it stays at most.
        wait: u32,
    }
    /// No program of this domain has a connection on the link any more, and none gets one (B-21).
    13 Left (Host) {
        /// Which.
        link: u32,
        /// Which memory.
        generation: u32,
    }
    /// The addresses at which a domain may be reached: hints, which replace those that were said before (B-22).
    15 Addresses (Host) {
        /// From the host: of the peer on which link. From a guest 0: its own.
        link: u32,
        /// At most [`ADDRESSES_MAX`](crate::ADDRESSES_MAX), as IPv6.
        addresses: Vec<[u8; 16]>,
    }
    /// A program wants a channel (B-14).
    16 Connect (Link Socket) {
        /// The domain on the other side; on a link the caller's.
        peer: Name,
        /// What to connect to.
        service: Name,
        /// Where the caller's window begins in its region.
        offset: u64,
        /// Bytes of it.
        len: u64,
        /// The first of its event channels: data, space, control.
        channel: u16,
    }
    /// The channel is agreed (B-14).
    17 Accept (Link Socket) {
        /// Where the window of who accepts begins in its region.
        offset: u64,
        /// Bytes of it.
        len: u64,
    }
    /// It is not done (B-15).
    18 Refuse (Host Link Socket) {
        /// Why, for programs: C-5 and [`code`](crate::code).
        code: u16,
        /// Why, for people.
        reason: Reason,
    }
    /// The connection is over on this side (B-14).
    19 Close (Link Socket) {}
    /// How many connections of this link the sender has; each follows (B-18).
    20 Calls (Link) {
        /// How many.
        connections: u16,
    }
    /// A connection that the sender has, named by the serial (B-18). What it does not know of it is 0.
    21 Call (Link) {
        /// Where the sender's window begins in its region.
        offset: u64,
        /// Bytes of it.
        len: u64,
        /// Where the receiver's window begins in its region.
        peer_offset: u64,
        /// Bytes of it.
        peer_len: u64,
        /// The first of its event channels.
        channel: u16,
        /// Whether a program still has it.
        side: Side,
    }
    /// Who waits for the other end of a TCP connection? Found answers, or Refuse (B-23).
    24 Seek (Link) {
        /// The connection's key (S-18).
        key: u32,
    }
    /// Where the other end waits (B-23).
    25 Found (Link Socket) {
        /// The domain in which it is; on a link who answers.
        peer: Name,
        /// The service of its process.
        service: Name,
    }
    /// Nobody waits for it here (B-23).
    26 Nobody (Link) {}
    /// How many interfaces this domain is to have; each follows (B-28).
    27 Nets (Host) {
        /// How many.
        count: u16,
    }
    /// An interface that this domain is to have; to a program an answer to Look (B-28).
    28 Net (Host Socket) {
        /// Its place among them: 1 for the first.
        at: u64,
        /// What it is called.
        interface: Name,
        /// The domain at the other end.
        peer: Name,
        /// Where they meet: a service of who listens.
        service: Name,
        /// Who listens.
        role: NetRole,
        /// Its MTU; 0: as the domain likes.
        mtu: u16,
        /// Its address, as IPv6; zeros: none.
        own: [u8; 16],
        /// Bits of the network that is reached by it, of 128; 0: none but the peer is.
        prefix: u8,
        /// The peer's address, as IPv6; zeros: none.
        theirs: [u8; 16],
        /// The interface whose port this one is; empty: it is no port.
        network: Reason,
        /// Its hardware address; zeros: as the domain likes.
        own_mac: [u8; 6],
        /// The peer's hardware address; zeros: any.
        their_mac: [u8; 6],
    }
    /// A service is to be reached here (B-15).
    32 Listen (Socket) {
        /// Its name.
        service: Name,
    }
    /// Join two domains (B-7).
    33 AddLink (Socket) {
        /// One.
        a: Name,
        /// The other.
        b: Name,
        /// Bytes of each region; 0: as configured.
        size: u64,
    }
    /// Take them apart (B-7).
    34 RemoveLink (Socket) {
        /// One.
        a: Name,
        /// The other.
        b: Name,
    }
    /// Show what there is.
    35 List (Socket) {
        /// Of what.
        what: What,
    }
    /// Show what QEMU or libvirt must be told for a domain.
    36 Snippet (Socket) {
        /// For which of the two.
        form: Form,
        /// For which domain.
        domain: Name,
    }
    /// A link, as an answer to List.
    37 LinkRow (Socket) {
        /// Its number.
        link: u32,
        /// Of its memory.
        generation: u32,
        /// One end.
        a: Name,
        /// The other.
        b: Name,
        /// Bytes of each region.
        size: u64,
        /// How far it is.
        state: LinkState,
        /// Bytes of earlier generations that are not given back (B-11).
        quarantined: u64,
        /// What there is to know.
        note: Reason,
    }
    /// A domain, as an answer to List.
    38 DomainRow (Socket) {
        /// Its name.
        name: Name,
        /// How it fares.
        life: Life,
        /// Slots in use by links.
        slots_used: u16,
        /// Slots in all.
        slots: u16,
        /// Bytes of its links.
        memory_used: u64,
        /// Its quota.
        memory: u64,
        /// What there is to know.
        note: Reason,
    }
    /// A line of a longer answer.
    39 Line (Socket) {
        /// Without its end.
        line: Line,
    }
    /// The answer is complete.
    40 Done (Socket) {}
    /// One end of a link, behind its LinkRow.
    42 EndRow (Socket) {
        /// The link's number.
        link: u32,
        /// The domain on this side.
        name: Name,
        /// How far it is.
        stage: Stage,
        /// How it fares.
        life: Life,
        /// The number by which it rings the peer, or [`NO_DOORBELL`](crate::NO_DOORBELL) (B-8).
        doorbell: u16,
        /// The vector at which it waits (B-8).
        vector: u16,
        /// Connections on the link, as this endpoint says.
        connections: u16,
        /// Bytes of its region that these have.
        used: u64,
        /// How often it rang the peer without end.
        storms: u32,
    }
    /// Which domain has a number? Number answers, or Refuse (B-19).
    41 Who (Socket) {
        /// The number, or [`NO_NUMBER`](crate::NO_NUMBER) for one's own domain.
        number: u16,
    }
    /// Show what programs of this kernel have (B-20).
    43 Look (Socket) {
        /// Of what.
        at: Seen,
        /// What comes behind this one; 0: from the first on.
        after: u64,
    }
    /// A connection, as an answer to Look (B-20).
    44 CallRow (Socket) {
        /// Its place among the connections.
        at: u64,
        /// The link that it is on.
        link: u32,
        /// Of its memory.
        generation: u32,
        /// The domain on the other side.
        peer: Name,
        /// How that fares (B-12).
        life: Life,
        /// What was connected to; empty: not known.
        service: Reason,
        /// Who met whom.
        end: ConnectionEnd,
        /// How far it is.
        progress: Progress,
        /// The process that asked for it or listened; 0: not known.
        process: u32,
        /// Whose it is; [`NOBODY`]: not known.
        user: u32,
        /// Milliseconds since it began; all ones: not known.
        age: u64,
        /// Bytes of this endpoint's window.
        own: u64,
        /// Bytes of the peer's.
        theirs: u64,
        /// How often the peer rang the link without end; all ones: not known.
        storms: u32,
        /// What this endpoint's rings say.
        own_words: Box<[u64; ROW_WORDS]>,
        /// What the peer's rings say.
        their_words: Box<[u64; ROW_WORDS]>,
    }
    /// A program that listens, as an answer to Look (B-20).
    45 ListenerRow (Socket) {
        /// Its place among the listeners.
        at: u64,
        /// What is listened to.
        service: Name,
        /// The process; 0: not known.
        process: u32,
        /// Whose it is.
        user: u32,
    }
    /// What the broker of an account says of its programs is wanted from here on (B-20).
    46 Enter (Socket) {
        /// The account.
        account: Name,
    }
    /// How many peer domains may have an address? Near answers (B-22).
    50 Locate (Socket) {
        /// As IPv6.
        address: [u8; 16],
    }
    /// How many peer domains may have the address (B-22).
    51 Near (Socket) {
        /// How many.
        domains: u8,
    }
    /// A program that listens here waits for the other end of a TCP connection (B-23).
    52 Claim (Socket) {
        /// The connection's key (S-18).
        key: u32,
    }
    /// It waits no longer (B-23).
    53 Unclaim (Socket) {
        /// The connection's key.
        key: u32,
    }
    /// In which peer domain does the other end wait? Found answers, or Refuse (B-23).
    54 Find (Socket) {
        /// The connection's key.
        key: u32,
        /// The other end's address, as IPv6.
        address: [u8; 16],
    }
    /// Make a machine's QEMU ready to migrate (B-26).
    60 Prepare (Socket) {
        /// The machine.
        domain: Name,
    }
    /// Take that back (B-26).
    61 CancelPrepare (Socket) {
        /// The machine.
        domain: Name,
    }
    /// A QEMU is ready to migrate, as an answer to Prepare (B-26).
    62 PreparedRow (Socket) {
        /// The machine.
        domain: Name,
        /// Links that were left.
        links: u16,
        /// Connections that were still open when their link went.
        cut: u32,
        /// Milliseconds that it took.
        took: u32,
        /// What there is to know.
        note: Reason,
    }
}

/// Words of the rings of one end in a row (B-20).
pub const ROW_WORDS: usize = 44;
/// A user that is not known (B-20).
pub const NOBODY: u32 = u32::MAX;

/// Numbers with names.
macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident { $($(#[$note:meta])* $variant:ident = $code:literal,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u8)]
        pub enum $name { $($(#[$note])* $variant = $code,)* }

        impl Field for $name {
            fn encode_into(&self, body: &mut Vec<u8>) {
                body.push(*self as u8);
            }
            fn decode_from(body: &mut &[u8]) -> Result<Self, Fault> {
                match chunk::<1>(body)?[0] {
                    $($code => Ok(Self::$variant),)*
                    _ => Err(Fault::new("B-2", concat!("no such ", stringify!($name)))),
                }
            }
        }
    )*};
}

codes! {
    /// Who may connect to whom.
    Way {
        /// The peer to a service of this domain.
        In = 1,
        /// This domain to a service of the peer.
        Out = 2,
    }
    /// How a side of a connection is (B-18).
    Side {
        /// A program has it.
        Open = 1,
        /// None has; the other side's Close is waited for.
        Over = 2,
    }
    /// How a domain fares (B-12).
    Life {
        /// Nobody can tell.
        Unknown = 0,
        /// It runs.
        Running = 1,
        /// It exists and does not run.
        Paused = 2,
        /// It is no more.
        DomainGone = 3,
    }
    /// How far a link is (B-7).
    LinkState {
        /// It is being made.
        Wanted = 1,
        /// Both domains have it.
        Up = 2,
        /// An end is not there.
        Waiting = 3,
        /// It is being taken back.
        Leaving = 4,
    }
    /// How far an end of a link is.
    Stage {
        /// Its QEMU is not there.
        Absent = 0,
        /// Its QEMU has not both regions.
        Unplugged = 1,
        /// Its QEMU has both regions; the guest said nothing.
        Silent = 2,
        /// The guest's broker is there and has not opened the link.
        Closed = 3,
        /// It has.
        Open = 4,
    }
    /// What to list.
    What {
        /// Links.
        Links = 0,
        /// Domains.
        Domains = 1,
    }
    /// What to look at (B-20).
    Seen {
        /// Connections.
        Connections = 0,
        /// Programs that listen.
        Listeners = 1,
        /// Interfaces that this domain is to have (B-28).
        Nets = 2,
    }
    /// Who meets whom for an interface (B-28).
    NetRole {
        /// This domain listens.
        Listen = 1,
        /// This domain connects to the peer.
        Connect = 2,
    }
    /// Which endpoint of a connection this is (B-20).
    ConnectionEnd {
        /// Not known: an earlier broker made it.
        Unknown = 0,
        /// Its program connected.
        Connected = 1,
        /// Its program listened.
        Listened = 2,
    }
    /// How far a connection is (B-20).
    Progress {
        /// The peer has not agreed yet.
        Asked = 1,
        /// Both agreed.
        Up = 2,
        /// The peer's side is over.
        Closed = 3,
    }
    /// For whom a snippet is.
    Form {
        /// QEMU's command line.
        Qemu = 0,
        /// libvirt's XML.
        Libvirt = 1,
    }
}
