// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Talks to the broker of the program's own kernel over a UNIX socket (V-1, V-2).

use std::{
    io::{self, IoSlice},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType},
    process::{Gid, Pid, Uid},
};
use tombolo_control::{Envelope, Message, Name, VERSION, VERSION_FIND, channel_is_sound};
use tombolo_domain::{Connecting, Deadline, Endpoint, Error, Result, wait_readable};
use tombolo_os::{
    lock::lock,
    passing,
    reserved::{ReservedFd, lifted},
};

use crate::{
    link::VmEndpoint,
    mailbox::malformed,
    port::{Port, reserve},
    socket::{receive, refused},
};

/// Time within which the broker of this kernel must answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Identity of this process to a broker, which reads it when the socket is connected.
type Credentials = (Pid, Uid, Gid);

/// Returns the error for a broker of other versions. Nothing that such a broker sends has the meaning that it has here
/// (B-6).
fn other_version(oldest: u16, newest: u16) -> Error {
    let why = format!(
        "it speaks versions {oldest} to {newest} and this program {VERSION} to {VERSION_FIND}: upgrade the older one"
    );
    Error::Os { call: "the broker", path: None, source: io::Error::new(io::ErrorKind::Unsupported, why) }
}

fn myself() -> Credentials {
    (rustix::process::getpid(), rustix::process::geteuid(), rustix::process::getegid())
}

/// A socket on which the last question was answered, kept for the next one (V-1). A child made by fork must not use it,
/// nor a process that has become another user meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Idle(Mutex<Option<(PathBuf, Credentials, Client)>>);

impl Idle {
    fn take_idle(&self, path: &Path) -> Option<Client> {
        let (reached, who, client) = lock(&self.0).take()?;
        (reached == path && who == myself()).then_some(client)
    }

    fn store_idle(&self, path: &Path, client: Client) {
        *lock(&self.0) = Some((path.into(), myself(), client));
    }
}

/// A conversation with the broker over one socket.
#[derive(Debug)]
pub(crate) struct Client {
    socket: ReservedFd,
    /// Serial of the last question; Hello had 0.
    serial: u32,
    /// Whether the last Connect is not answered yet.
    calling: bool,
    /// Name of this domain, as the broker gave it.
    domain: Name,
}

impl Client {
    /// Connects to the broker and sends Hello. The caller must receive the broker's Hello ([`greeted`](Self::greeted))
    /// before any other answer, but may ask a question before.
    pub(crate) fn reach(path: &Path) -> Result<Self> {
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
        let make =
            || ReservedFd::new(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?);
        let socket = lifted(make).map_err(|error| Error::os("socket", error))?;
        let address = SocketAddrUnix::new(path).map_err(absent)?;
        rustix::net::connect(&socket, &address).map_err(absent)?;

        let name: Name = "program".parse().expect("a name");
        let domain = name.clone();
        let client = Self { socket, serial: 0, calling: false, domain };
        let (boot, epoch) = ([0; 16], 0);
        client
            .send_message(0, Message::Hello { version_min: VERSION, version_max: VERSION_FIND, epoch, boot, name })?;
        Ok(client)
    }

    fn greeted(&mut self, deadline: Deadline) -> Result<()> {
        match self.answer(0, deadline, "the broker")? {
            (Message::Hello { version_min, version_max, .. }, _) if !(version_min..=version_max).contains(&VERSION) => {
                return Err(other_version(version_min, version_max));
            }
            (Message::Hello { name, .. }, _) => self.domain = name,
            _ => return Err(malformed("B-15", "the broker does not answer Hello")),
        }
        Ok(())
    }

    /// Connects to the broker and waits for its Hello.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let mut client = Self::reach(path)?;
        client.greeted(Deadline::after(PATIENCE))?;
        Ok(client)
    }

    /// Returns this domain's name, as the broker gave it.
    pub(crate) fn domain(&self) -> &Name {
        &self.domain
    }

    pub(crate) fn send_message(&self, serial: u32, message: Message) -> Result<()> {
        let bytes = Envelope { serial, message }.encode();
        passing::send(&self.socket, &[IoSlice::new(&bytes)], &[], SendFlags::DONTWAIT)
            .map(drop)
            .map_err(|error| Error::os("sendmsg to the broker", error))
    }

    /// Waits for the answer to a question about `address`. Turns a refusal into the error that it means.
    fn answer(&mut self, serial: u32, deadline: Deadline, address: &str) -> Result<(Message, Vec<OwnedFd>)> {
        loop {
            match receive(self.socket.as_fd())? {
                Some((Envelope { message: Message::Refuse { code, reason }, .. }, _)) => {
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

    /// Registers a service on this socket.
    pub(crate) fn listen(&mut self, service: Name, address: &str) -> Result<()> {
        self.send_message(1, Message::Listen { service })?;
        match self.answer(1, Deadline::after(PATIENCE), address)? {
            (Message::Done {}, _) => Ok(()),
            _ => Err(malformed("V-1", "the broker does not answer Listen")),
        }
    }

    /// Returns the number and the name of the domain that has `number` (B-19).
    pub(crate) fn who(&mut self, number: u16) -> Result<Option<(u16, Name)>> {
        self.send_message(1, Message::Who { number })?;
        match self.answer(1, Deadline::after(PATIENCE), "the domain with that number") {
            Ok((Message::Number { name, number }, _)) => Ok(Some((number, name))),
            Err(Error::NotFound(_)) => Ok(None),
            Ok(_) => Err(malformed("B-19", "the broker does not answer Who")),
            Err(error) => Err(error),
        }
    }

    /// Connects to a service of another domain through the broker at `path`, over the idle socket if there is one. The
    /// peer may not have accepted yet.
    pub(crate) fn connect(
        path: &Path,
        idle: &Idle,
        peer: &Name,
        service: Name,
        deadline: Deadline,
    ) -> Result<VmEndpoint> {
        let (address, question) = call_for(peer, service);
        let again = idle.take_idle(path).and_then(|mut client| {
            client.ask(question.clone()).ok()?;
            match client.stated(&address, deadline) {
                // The broker closed the idle socket before it read the question, or the broker is gone.
                Err(Error::PeerGone) => None,
                stated => Some((client, stated)),
            }
        });
        let (client, stated) = match again {
            Some(answered) => answered,
            None => {
                let mut client = Self::reach(path)?;
                // Hello and the question go out together: each wait of one process for the other costs two context
                // switches.
                let asked = client.ask(question);
                client.greeted(Deadline::after(PATIENCE))?;
                let stated = asked.and_then(|()| client.stated(&address, deadline));
                (client, stated)
            }
        };
        if !client.calling {
            idle.store_idle(path, client);
        }
        stated
    }

    fn ask(&mut self, question: Message) -> Result<()> {
        (self.serial, self.calling) = (self.serial.wrapping_add(1).max(1), true);
        self.send_message(self.serial, question)
    }

    /// Waits until the broker states the requested connection, and begins it.
    fn stated(&mut self, address: &str, deadline: Deadline) -> Result<VmEndpoint> {
        let (statement, descriptors) = self.answer(self.serial, deadline, address)?;
        self.calling = false;
        begin(statement, descriptors)
    }

    /// Returns the next connection to the service that this socket listens for, if there is one.
    pub(crate) fn accept(&mut self) -> Result<Option<VmEndpoint>> {
        while let Some((said, descriptors)) = receive(self.socket.as_fd())? {
            if matches!(said.message, Message::Connect { .. }) {
                return begin(said.message, descriptors).map(Some);
            }
        }
        Ok(None)
    }

    /// Ends the conversation, even if other processes hold its socket, and drops the connections that wait in it.
    pub(crate) fn hang_up(&self) {
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        while let Ok(Some(_)) = receive(self.socket.as_fd()) {}
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Returns the address of a service, for error messages, and the question that asks the broker for a connection.
fn call_for(peer: &Name, service: Name) -> (String, Message) {
    let (offset, len, channel) = (0, 0, 0);
    let address = format!("vm:{peer}/{service}");
    (address, Message::Connect { peer: peer.clone(), service, offset, len, channel })
}

/// A connection that was requested by a program that does not wait for the broker (V-2).
#[derive(Debug)]
pub(crate) struct PendingCall {
    path: PathBuf,
    idle: Arc<Idle>,
    address: String,
    question: Message,
    /// None once the connection was stated or refused.
    client: Option<Client>,
    /// Whether the socket was idle before: the broker may have closed it since.
    was_idle: bool,
    /// Whether the broker has answered Hello.
    greeted: bool,
}

impl PendingCall {
    /// Requests a connection, as [`Client::connect`] does.
    pub(crate) fn begin(path: PathBuf, idle: &Arc<Idle>, peer: &Name, service: Name) -> Result<Self> {
        let (address, question) = call_for(peer, service);
        let again = idle.take_idle(&path).and_then(|mut client| client.ask(question.clone()).ok().map(|()| client));
        let (was_idle, idle) = (again.is_some(), Arc::clone(idle));
        let mut call = Self { path, idle, address, question, client: again, was_idle, greeted: was_idle };
        if !was_idle {
            call.reach()?;
        }
        Ok(call)
    }

    /// Asks on a new socket.
    fn reach(&mut self) -> Result<()> {
        let mut client = Client::reach(&self.path).map_err(|error| match error {
            // Many programs ask the broker at once, and its backlog is full.
            Error::Os { source, .. } if source.kind() == io::ErrorKind::WouldBlock => Error::TimedOut,
            error => error,
        })?;
        client.ask(self.question.clone())?;
        (self.client, self.was_idle, self.greeted) = (Some(client), false, false);
        Ok(())
    }

    /// Returns the connection if the broker has stated it by now.
    fn stated(&mut self) -> Result<Option<VmEndpoint>> {
        let Some(client) = &mut self.client else { return Ok(None) };
        let now = Deadline::after(Duration::ZERO);
        if !self.greeted {
            client.greeted(now)?;
            self.greeted = true;
        }
        client.stated(&self.address, now).map(Some)
    }
}

impl Connecting for PendingCall {
    fn finish_connect(&mut self) -> Result<Option<Box<dyn Endpoint>>> {
        let mut stated = self.stated();
        if self.was_idle && matches!(stated, Err(Error::PeerGone)) {
            self.reach()?;
            stated = self.stated();
        }
        match stated {
            Err(Error::TimedOut) => Ok(None),
            stated => {
                if let Some(client) = self.client.take().filter(|client| !client.calling) {
                    self.idle.store_idle(&self.path, client);
                }
                Ok(stated?.map(|endpoint| Box::new(endpoint) as Box<dyn Endpoint>))
            }
        }
    }
}

/// Begins this endpoint's side of a connection that the broker stated (V-2).
pub(crate) fn begin(statement: Message, mut descriptors: Vec<OwnedFd>) -> Result<VmEndpoint> {
    let Message::Connect { peer, service, offset, len, channel } = statement else {
        return Err(malformed("V-2", "a call is stated by Connect"));
    };
    if !channel_is_sound(channel) {
        return Err(malformed("V-3", format!("a connection with event channel {channel}")));
    }
    if descriptors.is_empty() {
        return Err(malformed("V-2", "a connection without descriptors"));
    }
    let socket = descriptors.remove(0);
    let address = format!("vm:{peer}/{service}");
    VmEndpoint::new(Port::new(descriptors, (offset, len))?, reserve(socket)?, peer.as_str().into(), address)
}

#[cfg(test)]
mod tests {
    use rustix::{event::EventfdFlags, fs::MemfdFlags};
    use tombolo_control::code;
    use tombolo_domain::Memory as _;

    use super::*;

    /// Plays a broker that refuses the given number of questions in each conversation, and then ends it.
    fn refuse_all(listener: &OwnedFd, conversations: &[u32]) {
        for questions in conversations {
            let program = rustix::net::accept_with(listener, SocketFlags::CLOEXEC).unwrap();
            let hear = || {
                assert!(wait_readable(program.as_fd(), Deadline::after(PATIENCE)).unwrap(), "nothing is asked");
                receive(program.as_fd()).unwrap().unwrap().0
            };
            let say = |serial, message| rustix::io::write(&program, &Envelope { serial, message }.encode()).unwrap();
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
    fn b15_refusal_is_told_with_the_broker_s_reason_and_nothing_that_a_terminal_acts_on() {
        let told = |code| refused(code, "no rule\x1b[2J", "vm:b/s").to_string();
        assert_eq!(told(code::DENIED), "not allowed to reach vm:b/s: no rule\\u{1b}[2J");
        assert!(told(code::QUOTA).ends_with(": no rule\\u{1b}[2J"));
    }

    #[test]
    fn v1_next_call_is_asked_for_in_the_same_conversation_while_that_lasts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("broker.sock");
        let flags = SocketFlags::CLOEXEC;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let idle = Idle::default();
        let ask = |path: &Path| {
            let deadline = Deadline::after(PATIENCE);
            Client::connect(path, &idle, &"b".parse().unwrap(), "s".parse().unwrap(), deadline).unwrap_err()
        };
        std::thread::scope(|scope| {
            // The third question finds the conversation ended.
            scope.spawn(|| refuse_all(&listener, &[2, 1]));
            for _ in 0..3 {
                let error = ask(&path);
                assert!(matches!(error, Error::NotFound(_)), "{error}");
            }
        });
        // Another broker is not asked in this conversation, and a process with another identity by now does not ask in
        // it.
        let elsewhere = folder.path().join("none");
        assert!(matches!(ask(&elsewhere), Error::Os { call: "connect", .. }) && idle.take_idle(&path).is_none());
        let client = |who| {
            let (socket, _) = std::os::unix::net::UnixDatagram::pair().unwrap();
            let domain = "a".parse().unwrap();
            let client = Client { socket: ReservedFd::new(socket.into()).unwrap(), serial: 0, calling: false, domain };
            *idle.0.lock().unwrap() = Some((path.clone(), who, client));
        };
        let (process, user, group) = myself();
        client((process, user, group));
        assert!(idle.take_idle(&path).is_some());
        for who in [(Pid::INIT, user, group), (process, Uid::from_raw(4_000_000), group)] {
            client(who);
            assert!(idle.take_idle(&path).is_none(), "{who:?}");
        }
    }

    /// A broker of a test: the socket where programs connect, and the messages to each.
    struct TestBroker(tempfile::TempDir, OwnedFd);

    impl TestBroker {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let flags = SocketFlags::CLOEXEC;
            let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
            rustix::net::bind(&listener, &SocketAddrUnix::new(folder.path().join("broker.sock")).unwrap()).unwrap();
            rustix::net::listen(&listener, 1).unwrap();
            Self(folder, listener)
        }

        fn begin(&self, idle: &Arc<Idle>) -> Result<PendingCall> {
            PendingCall::begin(self.0.path().join("broker.sock"), idle, &"b".parse().unwrap(), "s".parse().unwrap())
        }

        fn accept(&self) -> OwnedFd {
            rustix::net::accept_with(&self.1, SocketFlags::CLOEXEC).unwrap()
        }
    }

    fn state_call(program: &OwnedFd, serial: u32) -> OwnedFd {
        let (ours, theirs) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let mut given: Vec<OwnedFd> = vec![theirs.into(), memory()];
        given.extend((0..6).map(|_| rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap()));
        let descriptors: Vec<_> = given.iter().map(AsFd::as_fd).collect();
        let message = Message::Connect {
            peer: "b".parse().unwrap(),
            service: "s".parse().unwrap(),
            offset: AT,
            len: LEN,
            channel: 4,
        };
        let bytes = Envelope { serial, message }.encode();
        passing::send(program, &[IoSlice::new(&bytes)], &descriptors, SendFlags::empty()).unwrap();
        ours.into()
    }

    /// One thread plays both sides: a wait for the broker here would be in vain.
    #[test]
    fn v2_call_that_is_begun_waits_for_the_broker_in_no_step_and_is_there_once_it_was_stated() {
        let (broker, idle, began) = (TestBroker::new(), Arc::default(), std::time::Instant::now());
        let mut call = broker.begin(&idle).unwrap();
        let nothing = |call: &mut PendingCall| assert!(call.finish_connect().unwrap().is_none());
        nothing(&mut call);
        let program = broker.accept();
        let hear = || receive(program.as_fd()).unwrap().map(|(said, _)| said);
        let (hello, question) = (hear().unwrap(), hear().unwrap());
        assert!(matches!(question.message, Message::Connect { .. }), "{question:?}");
        nothing(&mut call);
        rustix::io::write(&program, &hello.encode()).unwrap();
        nothing(&mut call);
        let _socket = state_call(&program, question.serial);
        let mut link = call.finish_connect().unwrap().expect("a call");
        link.send(b"hello", None).expect("room for what is said before the peer accepted");
        nothing(&mut call);
        // The next call asks in the same conversation, until the broker ends it.
        let mut call = broker.begin(&idle).unwrap();
        assert!(matches!(hear().unwrap().message, Message::Connect { .. }));
        nothing(&mut call);
        let message = Message::Refuse { code: code::NOT_FOUND, reason: "nobody".into() };
        rustix::io::write(&program, &Envelope { serial: 2, message }.encode()).unwrap();
        assert!(matches!(call.finish_connect(), Err(Error::NotFound(_))));
        let mut call = broker.begin(&idle).unwrap();
        drop(program);
        nothing(&mut call);
        let program = broker.accept();
        assert!(matches!(receive(program.as_fd()).unwrap().unwrap().0.message, Message::Hello { .. }), "anew");
        assert!(began.elapsed() < 4 * PATIENCE, "each of six looks may have waited");
    }

    #[test]
    fn v2_call_that_the_broker_has_no_time_for_is_for_later() {
        let (broker, idle) = (TestBroker::new(), Arc::default());
        let mut begun = Vec::new();
        let refused = loop {
            match broker.begin(&idle) {
                Ok(call) => begun.push(call),
                Err(error) => break error,
            }
            assert!(begun.len() < 100, "the backlog is never full");
        };
        assert!(matches!(refused, Error::TimedOut), "{refused}");
    }

    #[test]
    fn b6_broker_of_other_versions_is_believed_nothing_and_a_newer_one_that_speaks_ours_is_heard() {
        let ask = |versions: (u16, u16)| {
            let (listener, idle) = (TestBroker::new(), Arc::default());
            let mut call = listener.begin(&idle).unwrap();
            let program = listener.accept();
            let (version_min, version_max) = versions;
            let (epoch, boot, name) = (1, [0; 16], "here".parse().unwrap());
            let hello = Message::Hello { version_min, version_max, epoch, boot, name };
            rustix::io::write(&program, &Envelope { serial: 0, message: hello }.encode()).unwrap();
            let _socket = state_call(&program, 1);
            call.finish_connect().map(|link| link.is_some())
        };
        for versions in [(1, 1), (1, 9), (0, 1), (1, u16::MAX)] {
            assert!(matches!(ask(versions), Ok(true)), "{versions:?}");
        }
        for versions in [(2, 9), (0, 0), (9, 9), (2, 1)] {
            let refused = ask(versions).unwrap_err();
            assert!(matches!(refused, Error::Os { call: "the broker", .. }), "{versions:?}: {refused}");
        }
    }

    const AT: u64 = 4096;
    const LEN: u64 = 8192;

    fn memory() -> OwnedFd {
        let memory = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, AT + LEN).unwrap();
        memory
    }

    /// Returns a connection that was stated with so many eventfds and this channel, and the broker's side of its
    /// socket.
    fn call(events: usize, channel: u16) -> Result<(VmEndpoint, OwnedFd)> {
        call_in(memory(), events, channel)
    }

    fn call_in(memory: OwnedFd, events: usize, channel: u16) -> Result<(VmEndpoint, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let mut descriptors = vec![theirs, memory];
        descriptors.extend((0..events).map(|_| rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap()));
        let [peer, service]: [Name; 2] = ["a", "s"].map(|name| name.parse().unwrap());
        let connect = Message::Connect { peer, service, offset: AT, len: LEN, channel };
        begin(connect, descriptors).map(|link| (link, ours))
    }

    fn send_as_broker(socket: &OwnedFd, message: Message, memories: &[OwnedFd]) {
        let descriptors: Vec<_> = memories.iter().map(AsFd::as_fd).collect();
        let bytes = Envelope { serial: 0, message }.encode();
        passing::send(socket, &[IoSlice::new(&bytes)], &descriptors, SendFlags::empty()).unwrap();
    }

    #[test]
    fn v2_other_number_of_descriptors_is_refused() {
        for events in [1, 5, 7, 12] {
            assert!(matches!(call(events, 4), Err(Error::Malformed { clause: "V-2", .. })), "{events}");
        }
        // A window without eventfds comes from the kernel module, which this is not: nobody can wait for it.
        let (link, _broker) = call(0, 4).unwrap();
        assert!(matches!(
            link.wait_accepted(Deadline::after(PATIENCE)),
            Err(Error::Os { call: "TOMBOLO_IOC_EVENTFD", .. })
        ));
        let accept = Message::Accept { offset: AT, len: LEN };
        for memories in [0, 2] {
            let (mut link, broker) = call(6, 4).unwrap();
            assert!(matches!(link.recv(0), Ok(None)), "not accepted yet");
            send_as_broker(&broker, accept.clone(), &Vec::from_iter((0..memories).map(|_| memory())));
            assert!(matches!(link.recv(0), Err(Error::Malformed { clause: "V-2", .. })), "{memories}");
            assert!(matches!(link.recv(0), Err(Error::PeerGone)), "and that was all");
        }
        let (mut link, broker) = call(6, 4).unwrap();
        send_as_broker(&broker, accept.clone(), &[memory()]);
        assert!(matches!(link.recv(0), Ok(None)), "accepted");
        send_as_broker(&broker, accept, &[memory()]);
        link.liveness();
        assert!(matches!(link.recv(0), Err(Error::Malformed { clause: "V-2", .. })), "accepted twice");
    }

    #[test]
    fn v2_refusal_of_a_call_that_was_stated_is_the_error_that_it_means() {
        let (link, broker) = call(6, 4).unwrap();
        send_as_broker(&broker, Message::Refuse { code: code::NOT_FOUND, reason: "nobody".into() }, &[]);
        let error = link.wait_accepted(Deadline::after(PATIENCE)).unwrap_err();
        assert!(matches!(&error, Error::NotFound(address) if address == "vm:a/s"), "{error}");
        // For a limit the error names it.
        let (link, broker) = call(6, 4).unwrap();
        send_as_broker(&broker, Message::Refuse { code: code::QUOTA, reason: "the link has 64 calls".into() }, &[]);
        let error = link.wait_accepted(Deadline::after(PATIENCE)).unwrap_err();
        assert_eq!(error.to_string(), "vm:a/s is not to be had: the link has 64 calls");
        // So is the death of the broker before the connection was accepted: it never will be.
        let (mut link, broker) = call(6, 4).unwrap();
        drop(broker);
        assert!(matches!(link.recv(0), Err(Error::PeerGone)));
        assert!(matches!(link.wait_accepted(Deadline::after(PATIENCE)), Err(Error::PeerGone)));
    }

    #[test]
    fn d4_answer_of_a_peer_that_ended_while_it_was_greeted_is_read_before_its_end() {
        let memory = memory();
        let (mut peer, _broker) = call_in(memory.try_clone().unwrap(), 6, 4).unwrap();
        peer.send(b"welcome", None).unwrap();
        drop(peer);
        let (mut link, broker) = call(6, 4).unwrap();
        send_as_broker(&broker, Message::Accept { offset: AT, len: LEN }, &[memory]);
        send_as_broker(&broker, Message::Close {}, &[]);
        link.send(b"hello", None).expect("what it hears of the peer meanwhile is no reason not to have said this");
        let answer = link.recv(0).unwrap().map(|received| received.message);
        assert_eq!(answer.as_deref(), Some(&b"welcome"[..]));
        assert!(matches!(link.recv(0), Err(Error::PeerGone)));
        assert!(matches!(link.send(b"more", None), Err(Error::PeerGone)));
    }

    #[test]
    fn d8_descriptor_that_is_asked_for_after_the_end_polls_readable() {
        let (link, broker) = call(6, 4).unwrap();
        drop(broker);
        assert!(link.liveness().is_gone());
        assert!(wait_readable(link.fd(), Deadline::after(PATIENCE)).unwrap());
    }

    #[test]
    fn v8_ring_that_nobody_sized_fits_into_the_window() {
        let (mut link, _broker) = call(6, 4).unwrap();
        assert_eq!([1 << 20, 4096, 100].map(|wanted| link.affordable(wanted)), [4096, 4096, 100]);
        let (segment, _offer) = link.allocate(4096).unwrap();
        assert_eq!(segment.len(), 4096);
        assert_eq!(link.affordable(4096), 0, "no more is left");
    }

    #[test]
    fn v3_event_channel_that_no_call_may_have_is_refused() {
        for wrong in [0, 2, 509, 511, u16::MAX] {
            assert!(matches!(call(6, wrong), Err(Error::Malformed { clause: "V-3", .. })), "{wrong}");
        }
    }
}
