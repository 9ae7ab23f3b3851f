// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Members of the folder that are not an endpoint of the connection they claim (S-6): in a network namespace without
//! interfaces, or of another user. The victims are an unmodified program under the library and its peer; the strangers
//! send the real messages.

#[macro_use]
mod place;

use std::{
    env, fs,
    io::Write,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use place::{
    Place, SERVER, Started,
    world::{CLIENTS, SERVERS, World, interpreter, script},
};
use tombolo_domain::{Deadline, Endpoint, Rendezvous, SingleDoorbell};
use tombolo_domain_local::LocalDomain;
use tombolo_layout::{
    Features, SegmentHeader,
    sockets::{Claim, Counts, Message, Proof},
};
use tombolo_sockets::{
    hook,
    proof::{self, History, ProofSide},
    tuple::Tuple,
};

const CLIENT: &str = "10.77.0.2";
const QUESTION: &[u8] = b"what is the state of things?\n";
const ANSWER: &[u8] = b"all of it is well, as it was.\n";

/// What a stranger claims to have seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Knows {
    /// Nothing: a proof over no bytes, and counts of zero where its peer's are not known.
    Nothing,
    /// All bytes, which are easily guessed, and the counts that its peer names.
    Bytes,
}

// ---- the stranger's own process

/// Environment variable by which the tests start this program again, as the stranger.
const ROLE: &str = "TOMBOLO_STRANGER";
const SERVICE: &str = "sockets-0123456789abcdef";

#[test]
#[ignore = "a role of the other tests, which start it"]
fn stranger() {
    let role = env::var(ROLE).expect("the tests say what it is to do");
    let words: Vec<&str> = role.split(' ').collect();
    let [victim, knows, folder] = words[..] else { panic!("{role}") };
    let knows = if knows == "Bytes" { Knows::Bytes } else { Knows::Nothing };
    let folder = PathBuf::from(folder);
    let (server, client) = (format!("{SERVER}:7100").parse().unwrap(), format!("{CLIENT}:7200").parse().unwrap());
    let tuple = Tuple::new(server, client);
    let done = if victim == "client" { wait(&folder, tuple, knows) } else { seek(&folder, tuple.mirrored(), knows) };
    fs::write(folder.with_file_name("tried"), done).unwrap();
}

fn claim(tuple: Tuple, theirs: Option<&Claim>, history: &History, knows: Knows) -> Claim {
    // The side that speaks second has received the other's counts, and sends counts that match them.
    let counts = theirs.map_or_else(Counts::default, |theirs| Counts {
        written: theirs.counts.received,
        acked: theirs.counts.received,
        received: theirs.counts.acked,
    });
    let counts = match (theirs, knows) {
        // More than at the victim's claim, and less than the victim has moved since.
        (None, Knows::Bytes) => Counts { written: 2048, acked: 0, received: 2048 },
        _ => counts,
    };
    Claim {
        id: 77,
        cookie: theirs.map_or(0, |theirs| theirs.cookie),
        addresses: [tuple.own, tuple.peer],
        known: history.known(),
        counts,
        nonce: [5; 16],
    }
}

fn history(knows: Knows, sends: &[u8], receives: &[u8]) -> History {
    let mut history = History::default();
    if knows == Knows::Bytes {
        history.sent(0, &sends.repeat(40));
        history.received(0, &receives.repeat(40));
    }
    history
}

/// Makes a proof over as many bytes as both the stranger and its peer claim to know.
fn forge(side: ProofSide, history: &History, [proposal, answer]: [&Claim; 2]) -> Proof {
    let covered = [proposal.known[0].min(answer.known[1]), proposal.known[1].min(answer.known[0])].map(u32::from);
    proof::prove(side, history, None, [proposal, answer], covered).expect("it knows what it says to know")
}

fn receive(link: &mut dyn Endpoint) -> Option<Message> {
    let deadline = Instant::now() + Duration::from_secs(20);
    while Instant::now() < deadline {
        match link.recv(1 << 30) {
            Ok(Some(received)) => return Message::decode(&received.message).ok(),
            Ok(None) => std::thread::park_timeout(Duration::from_millis(1)),
            Err(_) => return None,
        }
    }
    None
}

fn send(link: &mut dyn Endpoint, message: &Message) {
    let header = SegmentHeader::new(1 << 16, 0, 0, Features::NONE, 77);
    let (segment, offer) = link.allocate(header.segment_len as usize).unwrap();
    let (control, _data) = segment.split(header.geometry().data_offset);
    control.write_header(&header.encode());
    let doorbell = SingleDoorbell::new().unwrap();
    let _ = link.send_with_doorbell(&message.encode(), Some(&offer), &doorbell);
    // They stay in place for the peer as long as this process lives.
    std::mem::forget((control, _data, doorbell));
}

/// Claims the side of the connection that waits. Returns how far it came.
fn wait(folder: &std::path::Path, tuple: Tuple, knows: Knows) -> String {
    let mut listener = LocalDomain::in_folder(folder).listen(SERVICE).unwrap();
    let open = |path: PathBuf, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    open(folder.join(format!("{SERVICE}.sock")), 0o666);
    if fs::create_dir(folder.join("claims")).is_ok() {
        // With the mode that the victim would use, or the one that another user needs.
        let own = rustix::process::geteuid().is_root();
        open(folder.join("claims"), if own { 0o700 } else { 0o1777 });
    }
    fs::write(folder.join("claims").join(format!("{}.waiting", tuple.key())), SERVICE).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut link = loop {
        if let Some(link) = listener.accept().unwrap() {
            break link;
        }
        if Instant::now() >= deadline {
            return "nobody came".into();
        }
        std::thread::park_timeout(Duration::from_millis(1));
    };
    let Some(Message::Propose(proposal)) = receive(&mut *link) else { return "nothing was proposed".into() };
    let history = history(knows, ANSWER, QUESTION);
    let own = claim(tuple, Some(&proposal), &history, knows);
    let proof = forge(ProofSide::Answerer, &history, [&proposal, &own]);
    send(&mut *link, &Message::Answer { to: proposal.id, claim: own, proof });
    format!("{:?}", receive(&mut *link))
}

/// Claims the side that seeks. Returns how far it came.
fn seek(folder: &std::path::Path, tuple: Tuple, knows: Knows) -> String {
    let file = folder.join("claims").join(format!("{}.waiting", tuple.key()));
    let deadline = Instant::now() + Duration::from_secs(20);
    let service = loop {
        match fs::read_to_string(&file) {
            Ok(service) if !service.is_empty() => break service,
            _ if Instant::now() >= deadline => return "nobody waits".into(),
            _ => std::thread::park_timeout(Duration::from_millis(1)),
        }
    };
    let mut link = LocalDomain::in_folder(folder).connect(&service, Deadline::after(Duration::from_secs(5))).unwrap();
    // Until enough bytes have passed that counts can be guessed.
    while !folder.with_file_name("warm").exists() && Instant::now() < deadline {
        std::thread::park_timeout(Duration::from_millis(1));
    }
    let history = history(knows, QUESTION, ANSWER);
    let own = claim(tuple, None, &history, knows);
    link.send(&Message::Propose(own).encode(), None).unwrap();
    let answer = receive(&mut *link);
    let Some(Message::Answer { claim: theirs, .. }) = answer else { return format!("{answer:?}") };
    let forged = forge(ProofSide::Proposer, &history, [&own, &theirs]);
    send(&mut *link, &Message::Confirm { to: theirs.id, proof: forged });
    format!("{:?}", receive(&mut *link))
}

// ---- the victims

/// A group of processes whose sockets' sequence numbers the kernel reports.
struct Group(PathBuf);

impl Group {
    /// Returns `None`, and reports a skip, where there is no cgroup v2, or no right to attach programs.
    fn new(test: &str) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let made = (|| {
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = hook::find_root()?.join(format!("tombolo-{}-{number}", std::process::id()));
            fs::create_dir(&path).ok()?;
            Some(Self(path))
        })();
        let attached = made.as_ref().map_or(Err(std::io::ErrorKind::NotFound.into()), |group| hook::attach(&group.0));
        if let Err(error) = &attached {
            let _ = writeln!(std::io::stderr(), "SKIP {test} (needs bpf): no program can be attached: {error}");
        }
        made.filter(|_| attached.is_ok())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        place::wait_until("the group is empty", || fs::remove_dir(&self.0).is_ok());
    }
}

/// Setup of a test.
#[derive(Clone, Copy, Default)]
struct Way<'a> {
    /// Group that all processes are in.
    group: Option<&'a Group>,
    /// User of the stranger, or of each of the two endpoints.
    users: [Option<u32>; 2],
    /// Whether both endpoints are in the server's namespace, at its loopback address.
    near: bool,
}

/// Returns a command in one of the world's namespaces, or in another one, with a test's setup.
fn within(namespace: &str, group: Option<&Group>, user: Option<u32>, words: &[&str]) -> Command {
    // The group is entered outside of the namespace: `ip` mounts /sys anew there, without the cgroups.
    let enter = group.map(|Group(path)| format!("echo $$ > {}/cgroup.procs && exec \"$0\" \"$@\"", path.display()));
    let mut command = match &enter {
        Some(enter) => {
            let mut command = Command::new("sh");
            command.args(["-c", enter, "ip"]);
            command
        }
        None => Command::new("ip"),
    };
    command.args(["netns", "exec", namespace]);
    if let Some(user) = user {
        let user = user.to_string();
        command.args(["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups"]);
    }
    command.args(words);
    command
}

/// Starts a server, and a client that sends requests until the file `tried` exists; those in `dressed` have the
/// library. The client comes first, so that it is dropped first.
fn victims(world: &World, dressed: &[usize], way: Way<'_>) -> [Started; 2] {
    let (python, asks) = (interpreter(), script("asks.py"));
    let user = |end: usize| way.users[end].filter(|_| dressed.len() == 2);
    let start = |end: usize, words: &[&str]| {
        let words = [&[&python[..], &asks], words].concat();
        let place = if way.near { SERVERS } else { end };
        let mut command = within(world.namespaces.name(place), way.group, user(end), &words);
        if dressed.contains(&end) {
            world.place.dress(&mut command);
        }
        Started::new(&mut command)
    };
    let [at, from] = if way.near { ["127.0.0.1"; 2] } else { [SERVER, CLIENT] };
    let server = start(SERVERS, &["serve", at, "7100"]);
    world.namespaces.wait_for(7100);
    let [warm, tried] = ["warm", "tried"].map(|name| world.text(name));
    let client = start(CLIENTS, &["ask", at, "7100", from, "7200", "200", &warm, &tried]);
    [client, server]
}

/// Lets a stranger claim the connection of a client, or of a server. Returns the stranger's result.
fn attack(world: &World, victim: usize, knows: Knows, way: Way<'_>) -> String {
    let place = &world.place;
    let nowhere = format!("{}n", world.namespaces.name(SERVERS));
    assert!(Command::new("ip").args(["netns", "add", &nowhere]).status().unwrap().success());
    let folder = place.path("meet");
    let role = format!("{} {knows:?} {}", if victim == CLIENTS { "client" } else { "server" }, folder.display());
    // A copy, because only one user may be able to read cargo's files.
    fs::copy(env::current_exe().unwrap(), place.path("stranger")).unwrap();
    let words = [&world.text("stranger")[..], "--ignored", "--exact", "stranger"];
    let said = fs::File::create(place.path("stranger.out")).unwrap();
    let mut stranger = within(&nowhere, way.group, way.users[0], &words);
    stranger.env(ROLE, role).stdout(said.try_clone().unwrap()).stderr(said);
    // A stranger that waits must have made its claim before the connection exists.
    let early = (victim == CLIENTS).then(|| {
        let runs = Started::new(&mut stranger);
        place::wait_until("the stranger claims", || {
            fs::read_dir(folder.join("claims")).is_ok_and(|claims| claims.count() > 0)
        });
        runs
    });
    let mut victims = victims(world, &[victim], way);
    early.unwrap_or_else(|| Started::new(&mut stranger)).finish();
    let came_to = fs::read_to_string(place.path("tried")).unwrap_or_default();
    assert!(!came_to.is_empty(), "{}", fs::read_to_string(place.path("stranger.out")).unwrap());
    // A victim that the stranger has taken over does not end by itself.
    if !place.log().contains("joined") {
        victims.iter_mut().for_each(|victim| assert!(victim.finish().success()));
    }
    drop(victims);
    let _ = Command::new("ip").args(["netns", "del", &nowhere]).status();
    came_to
}

/// Returns for each of these victims whether a stranger has become an endpoint of its connection, after the stranger
/// could try.
fn gets_in(world: &World, victims: &[usize], knows: Knows, way: Way<'_>) -> Vec<bool> {
    let tries = victims.iter().map(|&victim| {
        let _ = fs::remove_dir_all(world.place.path("meet/claims"));
        for file in ["tried", "warm", "log"] {
            let _ = fs::remove_file(world.place.path(file));
        }
        let came_to = attack(world, victim, knows, way);
        let _ = writeln!(std::io::stderr(), "the stranger to end {victim} came to {came_to}");
        assert_ne!(came_to, "nobody waits");
        world.place.log().contains("joined")
    });
    tries.collect()
}

fn open_to_all(world: &World) {
    for path in [world.place.path(""), world.place.path("meet")] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o1777)).unwrap();
    }
}

fn configure(world: &World, text: &str) {
    let file = world.place.path("meet/tombolo.conf");
    fs::write(&file, text).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(0o644)).unwrap();
}

const NOBODY: u32 = 65534;

fn nothing_known(world: &World) {
    assert_eq!(gets_in(world, &[CLIENTS, SERVERS], Knows::Nothing, Way::default()), [false, false]);
}

fn another_user(world: &World) {
    open_to_all(world);
    let way = Way { users: [Some(NOBODY); 2], ..Way::default() };
    assert_eq!(gets_in(world, &[CLIENTS], Knows::Bytes, way), [false]);
    assert!(world.place.log().contains("written to by others"), "{}", world.place.log());
    // A user whom the folder's owner names is a member; one who is not named is not.
    configure(world, "users = 1");
    assert_eq!(gets_in(world, &[CLIENTS], Knows::Bytes, way), [false]);
}

fn everything_known(world: &World) {
    let Some(group) = Group::new("s6_stranger_who_knows_every_byte_does_not_know_the_sequence_numbers") else { return };
    let way = Way { group: Some(&group), ..Way::default() };
    assert_eq!(gets_in(world, &[CLIENTS, SERVERS], Knows::Bytes, way), [false, false]);
    assert!(world.place.log().contains("sequence numbers"), "{}", world.place.log());
}

/// The case that the threat model describes for kernels that report no sequence numbers.
fn everything_known_and_no_numbers(world: &World) {
    if hook::find_root().is_some_and(|root| hook::is_attached(&root).unwrap_or(false)) {
        let test = "canary_stranger_who_knows_every_byte_gets_in_where_no_sequence_numbers_are_told";
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs bpf): this machine's kernel tells them to all");
        return;
    }
    assert_eq!(gets_in(world, &[CLIENTS, SERVERS], Knows::Bytes, Way::default()), [true, true]);
}

/// Returns whether two endpoints join, and what they print.
fn join(world: &World, way: Way<'_>) -> (bool, String) {
    // Both write to the log, whichever comes first.
    fs::write(world.place.path("log"), "").unwrap();
    fs::set_permissions(world.place.path("log"), fs::Permissions::from_mode(0o666)).unwrap();
    let mut ends = victims(world, &[CLIENTS, SERVERS], way);
    let log = || world.place.log();
    place::wait_until("both ends have decided", || {
        log().matches("joined").count() == 2 || log().contains("stays") && world.place.path("warm").exists()
    });
    fs::write(world.place.path("tried"), "").unwrap();
    ends.iter_mut().for_each(|end| assert!(end.finish().success()));
    for file in ["tried", "warm"] {
        fs::remove_file(world.place.path(file)).unwrap();
    }
    let said = log();
    let _ = fs::remove_file(world.place.path("log"));
    (said.matches("joined").count() == 2, said)
}

/// No endpoint has a right that an ordinary user lacks.
fn numbers_required(world: &World) {
    let Some(group) = Group::new("s6_ends_without_rights_prove_sequence_numbers") else { return };
    configure(world, "sequence-numbers = required\n");
    world.give(NOBODY);
    fs::set_permissions(world.place.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    for path in ["meet", "meet/tombolo.conf"] {
        std::os::unix::fs::chown(world.place.path(path), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let users = [Some(NOBODY); 2];
    let (joined, log) = join(world, Way { group: Some(&group), users, ..Way::default() });
    assert!(joined, "{log}");
    let (joined, log) = join(world, Way { users, ..Way::default() });
    assert!(!joined && log.contains("`tombolo hook attach`"), "{log}");
}

/// Two users in the folder of a third one.
fn two_users(world: &World) {
    open_to_all(world);
    let way = Way { users: [None, Some(NOBODY)], ..Way::default() };
    let (joined, log) = join(world, way);
    assert!(!joined && log.contains("written to by others"), "{log}");
    configure(world, "users = 0 65534\n");
    for near in [false, true] {
        let (joined, log) = join(world, Way { near, ..way });
        assert!(joined, "near: {near}: {log}");
    }
}

correct! {
    s6_stranger_in_a_namespace_without_interfaces_is_kept_out, ["ip"], nothing_known;
    s7_stranger_of_another_user_is_kept_out, ["setpriv"], another_user;
    s6_stranger_who_knows_every_byte_does_not_know_the_sequence_numbers, ["ip"], everything_known;
    canary_stranger_who_knows_every_byte_gets_in_where_no_sequence_numbers_are_told, ["ip"], everything_known_and_no_numbers;
    s6_ends_without_rights_prove_sequence_numbers, ["setpriv"], numbers_required;
    s7_two_users_meet_where_the_folders_owner_names_them, ["setpriv"], two_users;
}
