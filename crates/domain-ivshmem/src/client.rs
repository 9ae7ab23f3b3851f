// SPDX-License-Identifier: Apache-2.0 OR MIT
//! V-1, V-2. A program and the broker of its own kernel, over a UNIX socket.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, SocketAddrUnix,
        SocketFlags, SocketType,
    },
    process::{Gid, Pid, Uid},
};
use tombolo_control::{MESSAGE_MAX, Message, Name, Path as Way, Said, VERSION, channel_is_sound, code};
use tombolo_domain::{Deadline, Error, Result, wait_readable};

use crate::{link::VmLink, mailbox::malformed, port::Port};

/// How long the broker of one's own kernel may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most descriptors that the kernel lets anyone put into one datagram.
const SCM_MAX_FD: usize = 253;

/// The next message and what came with it; none while there is none.
pub(crate) fn receive(socket: BorrowedFd<'_>) -> Result<Option<(Said, Vec<OwnedFd>)>> {
    let mut buffer = [0; MESSAGE_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = loop {
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut buffer)], &mut control, flags) {
            Ok(received) => break received,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::CONNRESET | Errno::NOTCONN) => return Err(Error::PeerGone),
            Err(error) => return Err(Error::os("recvmsg", error)),
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Error::os("recvmsg", Errno::MFILE));
    }
    match (received.bytes, received.flags.contains(ReturnFlags::TRUNC)) {
        (0, _) => Err(Error::PeerGone),
        (_, true) => Err(malformed("B-1", "message is too long")),
        (len, false) => {
            let said =
                Said::decode(Way::Socket, &buffer[..len]).map_err(|fault| malformed(fault.clause, fault.what))?;
            Ok(Some((said, descriptors)))
        }
    }
}

/// Whether `fd` polls as hung up.
pub(crate) fn hung_up(fd: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(fd, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut polled, Some(&now)), Ok(1)) && polled[0].revents().contains(PollFlags::HUP)
}

/// Who one is to a broker, which knows it from when the socket was connected.
type Who = (Pid, Uid, Gid);

fn myself() -> Who {
    (rustix::process::getpid(), rustix::process::geteuid(), rustix::process::getegid())
}

/// V-1. A conversation whose last question was answered, for the next one. Neither a child made by fork nor who has become
/// another user meanwhile asks in it.
#[derive(Debug, Default)]
pub(crate) struct Idle(Mutex<Option<(PathBuf, Who, Client)>>);

impl Idle {
    fn take(&self, path: &Path) -> Option<Client> {
        let (reached, who, client) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        (reached == path && who == myself()).then_some(client)
    }

    fn keep(&self, path: &Path, client: Client) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((path.into(), myself(), client));
    }
}

/// A conversation with the broker.
#[derive(Debug)]
pub(crate) struct Client {
    socket: OwnedFd,
    /// That of the last question; 0 was Hello.
    serial: u32,
    /// Whether the last call was not answered yet.
    calling: bool,
    /// What the broker calls this domain.
    domain: Name,
    /// The first part of a call that was stated, until the second comes.
    half: Option<(Said, Vec<OwnedFd>)>,
}

/// A call that the broker stated: the caller's part and the part of who accepted.
struct Call {
    connect: Message,
    accept: Message,
    descriptors: Vec<OwnedFd>,
}

impl Client {
    /// Reaches the broker and says Hello. What it answers is to be heard ([`greeted`](Self::greeted)) before any other
    /// answer, but a question may be asked before.
    fn reach(path: &Path) -> Result<Self> {
        let absent = |error: Errno| Error::Os {
            call: "connect",
            path: Some(path.display().to_string()),
            source: match error {
                Errno::NOENT | Errno::CONNREFUSED => io::Error::new(
                    io::ErrorKind::NotFound,
                    "no broker runs here: start tombolod, or say with TOMBOLO_BROKER where its socket is",
                ),
                Errno::ACCESS => io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    "the broker does not serve this user: join the group that its configuration names",
                ),
                other => other.into(),
            },
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|error| Error::os("socket", error))?;
        let address = SocketAddrUnix::new(path).map_err(absent)?;
        rustix::net::connect(&socket, &address).map_err(absent)?;

        let name: Name = "program".parse().expect("a name");
        let domain = name.clone();
        let client = Self { socket, serial: 0, calling: false, domain, half: None };
        let (boot, epoch) = ([0; 16], 0);
        client.say(0, Message::Hello { version_min: VERSION, version_max: VERSION, epoch, boot, name })?;
        Ok(client)
    }

    fn greeted(&mut self) -> Result<()> {
        match self.answer(0, Deadline::after(PATIENCE), "the broker")? {
            (Message::Hello { name, .. }, _) => self.domain = name,
            _ => return Err(malformed("B-15", "the broker does not answer Hello")),
        }
        Ok(())
    }

    /// Reaches the broker and is greeted.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let mut client = Self::reach(path)?;
        client.greeted()?;
        Ok(client)
    }

    /// What the broker calls this domain.
    pub(crate) fn domain(&self) -> &Name {
        &self.domain
    }

    fn say(&self, serial: u32, message: Message) -> Result<()> {
        let bytes = Said { serial, message }.encode();
        let sent = rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(&bytes)],
            &mut Default::default(),
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        );
        sent.map(drop).map_err(|error| Error::os("sendmsg to the broker", error))
    }

    /// The answer to a question about `address`. A refusal is the error that it means.
    fn answer(&mut self, serial: u32, deadline: Deadline, address: &str) -> Result<(Message, Vec<OwnedFd>)> {
        loop {
            match receive(self.socket.as_fd())? {
                Some((Said { message: Message::Refuse { code, reason }, .. }, _)) => {
                    self.calling = false;
                    return Err(refused(code, reason.as_str(), address));
                }
                Some((said, descriptors)) if said.serial == serial => return Ok((said.message, descriptors)),
                Some(_) => {}
                None if !wait_readable(self.socket.as_fd(), deadline)? => return Err(Error::TimedOut),
                None => {}
            }
        }
    }

    /// Begins to listen.
    pub(crate) fn listen(&mut self, service: Name, address: &str) -> Result<()> {
        self.say(1, Message::Listen { service })?;
        match self.answer(1, Deadline::after(PATIENCE), address)? {
            (Message::Done {}, _) => Ok(()),
            _ => Err(malformed("V-1", "the broker does not answer Listen")),
        }
    }

    /// B-19. The domain that has `number`, and its number.
    pub(crate) fn who(&mut self, number: u16) -> Result<Option<(u16, Name)>> {
        self.say(1, Message::Who { number })?;
        match self.answer(1, Deadline::after(PATIENCE), "the domain with that number") {
            Ok((Message::Number { name, number }, _)) => Ok(Some((number, name))),
            Err(Error::NotFound(_)) => Ok(None),
            Ok(_) => Err(malformed("B-19", "the broker does not answer Who")),
            Err(error) => Err(error),
        }
    }

    /// Calls a service of another domain, by the broker at `path`, in the conversation that is idle if there is one.
    pub(crate) fn connect(path: &Path, idle: &Idle, peer: &Name, service: Name, deadline: Deadline) -> Result<VmLink> {
        let address = format!("vm:{peer}/{service}");
        let (offset, len, channel) = (0, 0, 0);
        let question = Message::Connect { peer: peer.clone(), service, offset, len, channel };
        let again = idle.take(path).and_then(|mut client| {
            client.ask(question.clone()).ok()?;
            match client.stated(&address, deadline) {
                // The broker let it go before it heard of this, or is gone.
                Err(Error::PeerGone) => None,
                stated => Some((client, stated)),
            }
        });
        let (client, stated) = match again {
            Some(answered) => answered,
            None => {
                let mut client = Self::reach(path)?;
                // At once: each time that one waits for the other costs two switches between them.
                let asked = client.ask(question);
                client.greeted()?;
                let stated = asked.and_then(|()| client.stated(&address, deadline));
                (client, stated)
            }
        };
        if !client.calling {
            idle.keep(path, client);
        }
        stated?.begin(peer.as_str().into(), true)
    }

    fn ask(&mut self, question: Message) -> Result<()> {
        (self.serial, self.calling) = (self.serial.wrapping_add(1).max(1), true);
        self.say(self.serial, question)
    }

    /// What the broker states of the call that was asked for.
    fn stated(&mut self, address: &str, deadline: Deadline) -> Result<Call> {
        let (connect, _) = self.answer(self.serial, deadline, address)?;
        let (accept, descriptors) = self.answer(self.serial, deadline, address)?;
        self.calling = false;
        Ok(Call { connect, accept, descriptors })
    }

    /// The next call for the service that is listened to.
    pub(crate) fn accept(&mut self) -> Result<Option<VmLink>> {
        while let Some((said, descriptors)) = receive(self.socket.as_fd())? {
            match (self.half.take(), &said.message) {
                (_, Message::Connect { .. }) => self.half = Some((said, descriptors)),
                (Some((first, _)), Message::Accept { .. }) if first.serial == said.serial => {
                    let Message::Connect { peer, .. } = &first.message else { unreachable!("only calls are kept") };
                    let peer = peer.as_str().into();
                    let call = Call { connect: first.message, accept: said.message, descriptors };
                    return call.begin(peer, false).map(Some);
                }
                _ => {}
            }
        }
        Ok(None)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Call {
    /// V-2. The caller's slice stands in Connect, that of who accepts in Accept.
    fn begin(self, peer: String, caller: bool) -> Result<VmLink> {
        let (
            Message::Connect { offset: from, len: from_len, channel, .. },
            Message::Accept { offset: to, len: to_len },
        ) = (self.connect, self.accept)
        else {
            return Err(malformed("V-2", "a call is stated by Connect and Accept"));
        };
        if !channel_is_sound(channel) {
            return Err(malformed("V-3", format!("a call with event channel {channel}")));
        }
        let (calling, called) = ((from, from_len), (to, to_len));
        let (own, theirs) = if caller { (calling, called) } else { (called, calling) };
        let mut descriptors = self.descriptors;
        if descriptors.is_empty() {
            return Err(malformed("V-2", "a call without descriptors"));
        }
        let socket = descriptors.remove(0);
        VmLink::new(Port::new(descriptors, own, theirs)?, socket, peer)
    }
}

/// B-15. What a refusal means.
fn refused(code: u16, reason: &str, address: &str) -> Error {
    match code {
        code::NOT_FOUND => Error::NotFound(address.into()),
        code::EXISTS => Error::InUse(address.into()),
        code::DENIED => Error::Denied(address.into()),
        code::QUOTA => Error::Limit {
            what: "what the broker may give (channels, memory or clients)",
            remedy: "close channels, or raise the limits in its configuration; its log says which",
        },
        _ => Error::Os {
            call: "the broker",
            path: Some(address.into()),
            source: io::Error::other(reason.escape_debug().to_string()),
        },
    }
}

#[cfg(test)]
mod tests {
    use rustix::{event::EventfdFlags, fs::MemfdFlags};

    use super::*;

    /// A broker that refuses as many questions in each conversation as is said, and then ends it.
    fn refuse_all(door: &OwnedFd, conversations: &[u32]) {
        for questions in conversations {
            let program = rustix::net::accept_with(door, SocketFlags::CLOEXEC).unwrap();
            let hear = || {
                assert!(wait_readable(program.as_fd(), Deadline::after(PATIENCE)).unwrap(), "nothing is asked");
                receive(program.as_fd()).unwrap().unwrap().0
            };
            let say = |serial, message| rustix::io::write(&program, &Said { serial, message }.encode()).unwrap();
            let hello = hear();
            assert!(matches!(hello.message, Message::Hello { .. }), "{hello:?}");
            say(0, hello.message);
            for serial in 1..=*questions {
                let question = hear();
                assert!(
                    matches!(question.message, Message::Connect { .. }) && question.serial == serial,
                    "{question:?}"
                );
                say(serial, Message::Refuse { code: code::NOT_FOUND, reason: "nobody".into() });
            }
        }
    }

    #[test]
    fn v1_next_call_is_asked_for_in_the_same_conversation_while_that_lasts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.sock");
        let flags = SocketFlags::CLOEXEC;
        let door = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::bind(&door, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&door, 1).unwrap();
        let idle = Idle::default();
        let ask = |path: &Path| {
            let deadline = Deadline::after(PATIENCE);
            Client::connect(path, &idle, &"b".parse().unwrap(), "s".parse().unwrap(), deadline).unwrap_err()
        };
        std::thread::scope(|scope| {
            // The third question finds the conversation ended.
            scope.spawn(|| refuse_all(&door, &[2, 1]));
            for _ in 0..3 {
                let error = ask(&path);
                assert!(matches!(error, Error::NotFound(_)), "{error}");
            }
        });
        // Another broker is not asked in it, and who is somebody else by now does not ask in it.
        let elsewhere = folder.path().join("none");
        assert!(matches!(ask(&elsewhere), Error::Os { call: "connect", .. }) && idle.take(&path).is_none());
        let client = |who| {
            let (socket, _) = std::os::unix::net::UnixDatagram::pair().unwrap();
            let domain = "a".parse().unwrap();
            let client = Client { socket: socket.into(), serial: 0, calling: false, domain, half: None };
            *idle.0.lock().unwrap() = Some((path.clone(), who, client));
        };
        let (process, user, group) = myself();
        client((process, user, group));
        assert!(idle.take(&path).is_some());
        for who in [(Pid::INIT, user, group), (process, Uid::from_raw(4_000_000), group)] {
            client(who);
            assert!(idle.take(&path).is_none(), "{who:?}");
        }
    }

    /// A statement with as many eventfds, which would do if nothing else is changed.
    fn call(events: usize, change: impl Fn(&mut Message, &mut Message)) -> Result<VmLink> {
        let (len, at) = (8192, 4096);
        let memory = || {
            let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&memory, at + len).unwrap();
            memory
        };
        let (ours, _theirs) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let mut descriptors = vec![ours.into(), memory(), memory()];
        descriptors.extend((0..events).map(|_| rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap()));
        let [peer, service]: [Name; 2] = ["a", "s"].map(|name| name.parse().unwrap());
        let mut connect = Message::Connect { peer, service, offset: at, len, channel: 4 };
        let mut accept = Message::Accept { offset: at, len };
        change(&mut connect, &mut accept);
        Call { connect, accept, descriptors }.begin("a".into(), true)
    }

    #[test]
    fn v2_other_number_of_descriptors_is_refused() {
        assert!(call(6, |_, _| {}).is_ok());
        for events in [1, 5, 7, 12] {
            assert!(matches!(call(events, |_, _| {}), Err(Error::Malformed { clause: "V-2", .. })), "{events}");
        }
        // Two slices alone are the kernel module's, which these are not.
        assert!(matches!(call(0, |_, _| {}), Err(Error::Os { .. })));
        let swapped = call(6, std::mem::swap);
        assert!(matches!(swapped, Err(Error::Malformed { clause: "V-2", .. })));
    }

    #[test]
    fn v3_event_channel_that_no_call_may_have_is_refused() {
        for wrong in [0, 2, 509, 511, u16::MAX] {
            let called = call(6, |connect, _| {
                if let Message::Connect { channel, .. } = connect {
                    *channel = wrong;
                }
            });
            assert!(matches!(called, Err(Error::Malformed { clause: "V-3", .. })), "{wrong}");
        }
    }
}
