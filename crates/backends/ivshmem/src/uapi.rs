// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mirrors the kernel module's interface, which `kernel/ivshmem/uapi/tombolo_ivshmem.h` explains field by field.

/// Declares structures laid out as in C, and the table that the test compares with the header.
macro_rules! mirror {
    ($($(#[$doc:meta])* $name:ident = $c:literal { $($(#[$note:meta])* $field:ident: $type:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
            pub struct $name { $($(#[$note])* pub $field: $type,)* }
        )*

        /// Name in C, size, and for each field its name, offset and size.
        #[cfg(test)]
        const MIRRORED: &[(&str, usize, &[(&str, usize, usize)])] = &[$((
            $c,
            size_of::<$name>(),
            &[$((stringify!($field), std::mem::offset_of!($name, $field), size_of::<$type>()),)*],
        ),)*];
    };
}

mirror! {
    /// Description of a device.
    Info = "tombolo_info" {
        /// [`VERSION`].
        version: u32,
        /// `INFO_…`
        flags: u32,
        /// Bytes of shared memory.
        size: u64,
        /// This domain's own doorbell number.
        peer: u32,
        /// Number of interrupt vectors.
        vectors: u32,
        /// Number of interrupts that arrived.
        interrupts: u64,
        /// Number of times that a vector was closed for a while.
        storms: u64,
        /// Zero.
        reserved: [u64; 3],
    }
    /// A link: the memory and the doorbells that two machines share.
    LinkArgs = "tombolo_link" {
        /// Offset of this domain's region half in the device of the node that is asked.
        own_offset: u64,
        /// Bytes of it.
        own_length: u64,
        /// Offset of the peer's region half in the device of `peer_fd`.
        peer_offset: u64,
        /// Bytes of it.
        peer_length: u64,
        /// Node of the peer's region half.
        peer_fd: i32,
        /// Node of a device with a doorbell.
        doorbell_fd: i32,
        /// Number of the peer to notify.
        notify_peer: u16,
        /// Vector at which the peer is notified.
        notify_vector: u16,
        /// Vector at which the peer's notifications arrive.
        wait_vector: u16,
        /// Zero.
        flags: u16,
    }
    /// Peer that a link notifies.
    NotifyArgs = "tombolo_notify" {
        /// Number of the peer, or [`NOBODY`].
        peer: u16,
        /// Vector at which the peer is notified.
        vector: u16,
    }
    /// A window: a range of a region half.
    WindowArgs = "tombolo_window" {
        /// Number for the caller's own use.
        cookie: u64,
        /// Offset within the region half.
        offset: u64,
        /// Bytes.
        length: u64,
        /// `WINDOW_…`
        flags: u32,
        /// Number of the first event channel.
        channel: u32,
        /// Number of event channels.
        channels: u32,
        /// Bound below which a state byte counts as open; 0: no state bytes.
        below: u16,
        /// Value that open state bytes get at the last close.
        closed: u16,
        /// Offsets of the state bytes in the window.
        state: [u32; 2],
    }
    /// Buffer for a list of windows.
    WindowsArgs = "tombolo_windows" {
        /// Address of the buffer.
        entries: u64,
        /// Entries that fit; returned as the number of windows.
        count: u32,
        /// Zero.
        reserved: u32,
    }
    /// A range of this domain's region half.
    RangeArgs = "tombolo_range" {
        /// Offset within the region half.
        offset: u64,
        /// Bytes.
        length: u64,
    }
    /// Eventfd that an event channel signals.
    EventfdArgs = "tombolo_eventfd" {
        /// The event channel; 0 is the window's first.
        channel: u32,
        /// The eventfd; -1: none.
        fd: i32,
    }
    /// A network interface.
    NetArgs = "tombolo_net" {
        /// Its name, which may contain `%d`; returned in its final form.
        name: [u8; 16],
        /// Its address.
        address: [u8; 6],
        /// Zero.
        reserved: u16,
        /// Its MTU.
        mtu: u32,
        /// Its number, which is returned.
        index: u32,
        /// Features that it can take, returned as bits of a hello (N-4).
        takes: u64,
    }
    /// A channel that an interface takes over.
    NetLinkArgs = "tombolo_net_link" {
        /// Window with the own segment.
        own_fd: i32,
        /// Window with the peer's segment.
        peer_fd: i32,
        /// Offset of the own segment in its window.
        own_segment: u64,
        /// Offset of the peer's segment in its window.
        peer_segment: u64,
        /// The writer's record: its position.
        tail: u64,
        /// Head that the writer last saw.
        head_seen: u64,
        /// Wait word for which the writer last notified.
        notified_data: u64,
        /// The reader's record: its position.
        head: u64,
        /// Tail that the reader last saw.
        tail_seen: u64,
        /// Wait word for which the reader last notified.
        notified_space: u64,
        /// Features of the peer's hello.
        gives: u64,
        /// Features of the own hello.
        takes: u64,
        /// Longest frame that the peer takes.
        gives_most: u32,
        /// Longest frame that this endpoint takes.
        takes_most: u32,
        /// Offset of the state word in the peer's window.
        state: u32,
        /// First state that means that the peer's endpoint has ended.
        over: u32,
        /// The peer's address.
        source: [u8; 6],
        /// `NET_…`
        flags: u16,
    }
    /// Positions of the pipes of a channel that an interface gives back.
    NetTurn = "tombolo_net_turn" {
        /// As in [`NetLinkArgs`].
        tail: u64,
        /// As in [`NetLinkArgs`].
        head_seen: u64,
        /// As in [`NetLinkArgs`].
        notified_data: u64,
        /// As in [`NetLinkArgs`].
        head: u64,
        /// As in [`NetLinkArgs`].
        tail_seen: u64,
        /// As in [`NetLinkArgs`].
        notified_space: u64,
        /// Reason why the link ended: `NET_ENDED_…`, or 0.
        ended: u32,
        /// Number of the clause R-… that a corrupt ring violated.
        clause: u32,
    }
    /// Counters of an interface.
    NetStat = "tombolo_net_stat" {
        /// Counters of frames to the peer.
        sent: [u64; 16],
        /// Counters of frames from the peer.
        received: [u64; 16],
        /// Counters of both directions.
        both: [u64; 8],
    }
    /// Network namespace and name of an interface.
    NetPlace = "tombolo_net_place" {
        /// Its name in that namespace.
        name: [u8; 16],
        /// Its number in that namespace.
        index: u32,
        /// Zero.
        reserved: u32,
    }
}

/// Version of the interface.
pub const VERSION: u32 = 2;
/// Offset of a region half's sequence words.
pub const SEQUENCE_OFFSET: u32 = 0x800;
/// Number of event channels of a link.
pub const CHANNELS: u32 = 512;
/// Largest number of event channels of a window.
pub const WINDOW_CHANNELS: u32 = 64;
/// Peer number that means that no peer is notified.
pub const NOBODY: u16 = 0xffff;
/// The device has interrupts.
pub const INFO_DOORBELL: u32 = 1 << 0;
/// Its memory is mapped write-back.
pub const INFO_WRITE_BACK: u32 = 1 << 1;
/// The window is a range of the peer's region half.
pub const WINDOW_PEER: u32 = 1 << 0;
/// The window can be mapped for reading only.
pub const WINDOW_READ_ONLY: u32 = 1 << 1;

/// Frames may come from addresses other than the peer's.
pub const NET_ANY_SOURCE: u16 = 1 << 0;
/// The peer closed the channel.
pub const NET_ENDED_CLOSED: u32 = 1;
/// The peer aborted the channel.
pub const NET_ENDED_ABORTED: u32 = 2;
/// The peer's window was closed.
pub const NET_ENDED_GONE: u32 = 3;
/// The peer's ring is corrupt.
pub const NET_ENDED_CORRUPT: u32 = 4;
/// The link was hung up, or a device unplugged.
pub const NET_ENDED_REVOKED: u32 = 5;

/// Direction in which an ioctl's argument is passed, from the program's point of view.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    None = 0,
    Write = 1,
    Read = 2,
    Both = 3,
}

/// Returns the number of an ioctl, composed as in `asm-generic/ioctl.h`.
pub(crate) const fn opcode(way: Way, number: u32, size: usize) -> u32 {
    (way as u32) << 30 | (size as u32) << 16 | 0xe7 << 8 | number
}

pub(crate) const IOC_INFO: u32 = opcode(Way::Read, 0, size_of::<Info>());
pub(crate) const IOC_LINK: u32 = opcode(Way::Write, 1, size_of::<LinkArgs>());
pub(crate) const IOC_WINDOW: u32 = opcode(Way::Write, 2, size_of::<WindowArgs>());
pub(crate) const IOC_WINDOWS: u32 = opcode(Way::Both, 3, size_of::<WindowsArgs>());
pub(crate) const IOC_HANG_UP: u32 = opcode(Way::None, 4, 0);
pub(crate) const IOC_EVENTFD: u32 = opcode(Way::Write, 5, size_of::<EventfdArgs>());
pub(crate) const IOC_NOTIFY: u32 = opcode(Way::Write, 6, size_of::<NotifyArgs>());
pub(crate) const IOC_CLEAR: u32 = opcode(Way::Write, 7, size_of::<RangeArgs>());
pub(crate) const IOC_NET: u32 = opcode(Way::Both, 8, size_of::<NetArgs>());
pub(crate) const IOC_NET_LINK: u32 = opcode(Way::Write, 9, size_of::<NetLinkArgs>());
pub(crate) const IOC_NET_UNLINK: u32 = opcode(Way::Read, 10, size_of::<NetTurn>());
pub(crate) const IOC_NET_STAT: u32 = opcode(Way::Read, 11, size_of::<NetStat>());
pub(crate) const IOC_NET_PLACE: u32 = opcode(Way::Read, 12, size_of::<NetPlace>());

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn header() -> String {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../kernel/ivshmem/uapi/tombolo_ivshmem.h");
        std::fs::read_to_string(path).expect("the module's header is in the repository")
    }

    /// Name, size and fields of each structure, laid out by C's rules.
    type Structures = BTreeMap<String, (usize, Vec<(String, usize, usize)>)>;

    fn structures(header: &str) -> Structures {
        let mut found = Structures::new();
        let mut lines = header.lines();
        while let Some(line) = lines.next() {
            let Some(name) = line.strip_prefix("struct ").and_then(|rest| rest.strip_suffix(" {")) else { continue };
            let (mut fields, mut end, mut widest) = (Vec::new(), 0usize, 1);
            for line in lines.by_ref().take_while(|line| !line.starts_with('}')) {
                let (declared, _comment) = line.split_once(';').expect("one field a line");
                let (kind, name) = declared.trim().split_once(char::is_whitespace).expect("a type and a name");
                let bits: usize = kind[3..].parse().expect("__uN or __sN");
                let (name, count) = match name.trim().strip_suffix(']').and_then(|name| name.split_once('[')) {
                    Some((name, count)) => (name, count.parse().expect("a number of elements")),
                    None => (name.trim(), 1),
                };
                let width = bits / 8;
                let offset = end.next_multiple_of(width);
                fields.push((name.to_owned(), offset, width * count));
                (end, widest) = (offset + width * count, widest.max(width));
            }
            found.insert(name.into(), (end.next_multiple_of(widest), fields));
        }
        found
    }

    /// Returns the value of `#define NAME`, without its comment.
    fn defined(header: &str, name: &str) -> String {
        let lines = header.lines().filter_map(|line| line.strip_prefix("#define ")?.split_once(char::is_whitespace));
        let (_, value) = lines.into_iter().find(|(it, _)| *it == name).unwrap_or_else(|| panic!("no {name}"));
        value.split("/*").next().expect("split gives one").trim().into()
    }

    fn differences(header: &str) -> Vec<String> {
        let mut wrong = Vec::new();
        let theirs = structures(header);
        for (name, size, fields) in MIRRORED {
            let fields: Vec<_> = fields.iter().map(|(name, at, size)| ((*name).to_owned(), *at, *size)).collect();
            if theirs.get(*name) != Some(&(*size, fields.clone())) {
                wrong.push(format!("{name}: {:?} here, {:?} there", (size, fields), theirs.get(*name)));
            }
        }
        wrong.extend(theirs.keys().filter(|name| MIRRORED.iter().all(|it| it.0 != name.as_str())).cloned());
        let numbers = [
            ("TOMBOLO_UAPI_VERSION", VERSION.to_string()),
            ("TOMBOLO_SEQUENCE_OFFSET", format!("{SEQUENCE_OFFSET:#x}")),
            ("TOMBOLO_CHANNELS", CHANNELS.to_string()),
            ("TOMBOLO_WINDOW_CHANNELS", WINDOW_CHANNELS.to_string()),
            ("TOMBOLO_NOBODY", format!("{NOBODY:#x}")),
            ("TOMBOLO_INFO_DOORBELL", format!("(1U << {})", INFO_DOORBELL.ilog2())),
            ("TOMBOLO_INFO_WRITE_BACK", format!("(1U << {})", INFO_WRITE_BACK.ilog2())),
            ("TOMBOLO_WINDOW_PEER", format!("(1U << {})", WINDOW_PEER.ilog2())),
            ("TOMBOLO_WINDOW_READ_ONLY", format!("(1U << {})", WINDOW_READ_ONLY.ilog2())),
            ("TOMBOLO_NET_ANY_SOURCE", format!("(1U << {})", NET_ANY_SOURCE.ilog2())),
            ("TOMBOLO_NET_ENDED_CLOSED", NET_ENDED_CLOSED.to_string()),
            ("TOMBOLO_NET_ENDED_ABORTED", NET_ENDED_ABORTED.to_string()),
            ("TOMBOLO_NET_ENDED_GONE", NET_ENDED_GONE.to_string()),
            ("TOMBOLO_NET_ENDED_CORRUPT", NET_ENDED_CORRUPT.to_string()),
            ("TOMBOLO_NET_ENDED_REVOKED", NET_ENDED_REVOKED.to_string()),
            ("TOMBOLO_IOC_MAGIC", "0xE7".into()),
            ("TOMBOLO_IOC_INFO", "_IOR(TOMBOLO_IOC_MAGIC, 0, struct tombolo_info)".into()),
            ("TOMBOLO_IOC_LINK", "_IOW(TOMBOLO_IOC_MAGIC, 1, struct tombolo_link)".into()),
            ("TOMBOLO_IOC_WINDOW", "_IOW(TOMBOLO_IOC_MAGIC, 2, struct tombolo_window)".into()),
            ("TOMBOLO_IOC_WINDOWS", "_IOWR(TOMBOLO_IOC_MAGIC, 3, struct tombolo_windows)".into()),
            ("TOMBOLO_IOC_HANG_UP", "_IO(TOMBOLO_IOC_MAGIC, 4)".into()),
            ("TOMBOLO_IOC_EVENTFD", "_IOW(TOMBOLO_IOC_MAGIC, 5, struct tombolo_eventfd)".into()),
            ("TOMBOLO_IOC_NOTIFY", "_IOW(TOMBOLO_IOC_MAGIC, 6, struct tombolo_notify)".into()),
            ("TOMBOLO_IOC_CLEAR", "_IOW(TOMBOLO_IOC_MAGIC, 7, struct tombolo_range)".into()),
            ("TOMBOLO_IOC_NET", "_IOWR(TOMBOLO_IOC_MAGIC, 8, struct tombolo_net)".into()),
            ("TOMBOLO_IOC_NET_LINK", "_IOW(TOMBOLO_IOC_MAGIC, 9, struct tombolo_net_link)".into()),
            ("TOMBOLO_IOC_NET_UNLINK", "_IOR(TOMBOLO_IOC_MAGIC, 10, struct tombolo_net_turn)".into()),
            ("TOMBOLO_IOC_NET_STAT", "_IOR(TOMBOLO_IOC_MAGIC, 11, struct tombolo_net_stat)".into()),
        ];
        for (name, here) in numbers {
            let there = defined(header, name);
            if here != there {
                wrong.push(format!("{name}: {here} here, {there} there"));
            }
        }
        wrong
    }

    #[test]
    fn interface_is_the_headers_field_by_field() {
        assert_eq!(differences(&header()), [""; 0]);
        assert_eq!([IOC_INFO, IOC_HANG_UP, IOC_WINDOWS], [0x8040_e700, 0xe704, 0xc010_e703]);
    }

    #[test]
    fn canary_header_that_differs_is_noticed() {
        for (from, to) in [
            ("__u16 notify_peer;", "__u32 notify_peer;"),
            ("__u32 channel;\t\t/* the first", "__u32 first;\t\t/* the first"),
            ("#define TOMBOLO_CHANNELS\t512", "#define TOMBOLO_CHANNELS\t256"),
            ("_IOC_MAGIC, 5", "_IOC_MAGIC, 6"),
            ("\t__u64 storms;", "\t__u64 more;\n\t__u64 storms;"),
        ] {
            let changed = header().replace(from, to);
            assert_ne!(changed, header(), "nothing to change: {from}");
            assert!(!differences(&changed).is_empty(), "{to}");
        }
    }
}
