// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Unmodified programs with and without the library: the same behaviour, the same bytes, and from the library's own
//! counters that the bytes went through shared memory.

use std::{
    env, fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Far beyond what anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where ends meet and what they leave behind.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        fs::create_dir(place.path("meet")).unwrap();
        fs::create_dir(place.path("reports")).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Bytes that programs received: over TCP, through shared memory.
    fn received(&self) -> (u64, u64) {
        let mut total = (0, 0);
        for report in fs::read_dir(self.path("reports")).unwrap() {
            let text = fs::read_to_string(report.unwrap().path()).unwrap();
            let report: serde_json::Value = serde_json::from_str(&text).unwrap();
            total.0 += report["received_tcp"].as_u64().unwrap();
            total.1 += report["received_shared"].as_u64().unwrap();
        }
        total
    }

    /// Whether at least so many hundredths of `payload` bytes crossed shared memory.
    fn shared(&self, payload: u64, percent: u64) -> Result<(), String> {
        let (tcp, shared) = self.received();
        if shared * 100 >= payload * percent {
            return Ok(());
        }
        Err(format!("{shared} of {payload} bytes through shared memory, {tcp} over TCP; the log:\n{}", self.log()))
    }

    /// `command` as `tombolo run` starts it.
    fn dress(&self, command: &mut Command) {
        let library = env::current_exe().unwrap().with_file_name("libtombolo_preload.so");
        assert!(library.is_file(), "{} is not built", library.display());
        command.env("LD_PRELOAD", library).env("TOMBOLO_SOCKETS", self.path("meet"));
        command.env("TOMBOLO_SOCKETS_LOG", self.path("log")).env("TOMBOLO_SOCKETS_REPORT", self.path("reports"));
    }

    /// Nothing stays in the folder where ends meet.
    fn assert_tidy(&self) {
        let claims = self.path("meet").join("claims");
        let left: Vec<_> = [self.path("meet"), claims.clone()]
            .iter()
            .filter_map(|folder| fs::read_dir(folder).ok())
            .flat_map(|entries| entries.map(|entry| entry.unwrap().path()))
            .filter(|path| *path != claims)
            .collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

/// A child that does not outlive its test.
struct Started(Child);

impl Started {
    fn new(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }

    fn finish(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until("the program ends", || {
            status = self.0.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// Asks it to end.
    fn terminate(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        self.finish();
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        thread::park_timeout(Duration::from_millis(5));
    }
}

/// Whether the programs are here; if not, the test is skipped aloud.
fn has(test: &str, programs: &[&str]) -> bool {
    let missing = programs.iter().find(|program| {
        let folders = env::var_os("PATH").unwrap_or_default();
        !env::split_paths(&folders).any(|folder| folder.join(program).is_file())
    });
    if let Some(program) = missing {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs {program}): it is not installed");
    }
    missing.is_none()
}

fn python(script: &str) -> Command {
    // Debian's own: what stands before it in the path may be a wrapper that is not it.
    let debian = Path::new("/usr/bin/python3");
    let mut command = Command::new(if debian.is_file() { debian } else { Path::new("python3") });
    command.arg("-u").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(script));
    command
}

fn output(command: &mut Command, to: &Path) -> String {
    let file = fs::File::create(to).unwrap();
    let status = Started::new(command.stdout(file)).finish();
    let text = fs::read_to_string(to).unwrap();
    assert!(status.success(), "{command:?}: {status}\n{text}");
    text
}

/// Two network namespaces with a pair of virtual Ethernet devices between them.
struct Namespaces([String; 2]);

const SERVER: &str = "10.77.0.1";

impl Namespaces {
    /// `None`, and a skip that is said aloud, where they cannot be made.
    fn new(test: &str) -> Option<Self> {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let names = ["a", "b"].map(|end| format!("tombolo-{}-{number}{end}", std::process::id()));
        let made = Self(names);
        let [a, b] = &made.0;
        let steps = [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("link add v0 netns {a} type veth peer name v1 netns {b}"),
            format!("-n {a} addr add {SERVER}/24 dev v0"),
            format!("-n {b} addr add 10.77.0.2/24 dev v1"),
            format!("-n {a} link set v0 up"),
            format!("-n {b} link set v1 up"),
        ];
        for step in steps {
            let done = Command::new("ip").args(step.split(' ')).stdout(Stdio::null()).stderr(Stdio::null()).status();
            if !done.is_ok_and(|status| status.success()) {
                let _ = writeln!(std::io::stderr(), "SKIP {test} (needs netns): `ip {step}` fails");
                return None;
            }
        }
        Some(made)
    }

    fn command(&self, end: usize, program: &str, arguments: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0[end]]).arg(program).args(arguments.split(' '));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// Waits until somebody listens at `port` of the first.
    fn wait_for(&self, port: u16) {
        let wanted = format!(":{port:04X} ");
        wait_until("the server listens", || {
            let mut look = Command::new("ip");
            let seen = look.args(["netns", "exec", &self.0[0], "cat", "/proc/net/tcp", "/proc/net/tcp6"]).output();
            let text = String::from_utf8_lossy(&seen.unwrap().stdout).into_owned();
            text.lines().any(|line| line.contains(&wanted) && line.contains(" 0A "))
        });
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = Command::new("ip").args(["netns", "del", name]).stderr(Stdio::null()).status();
        }
    }
}

fn random_file(path: &Path, len: usize) -> Vec<u8> {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let bytes: Vec<u8> = (0..len / 8)
        .flat_map(|_| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed.to_le_bytes()
        })
        .collect();
    fs::write(path, &bytes).unwrap();
    bytes
}

#[test]
fn semantics_with_the_library_are_those_without() {
    if !has("semantics_with_the_library_are_those_without", &["python3"]) {
        return;
    }
    let place = Place::new();
    let plain = output(&mut python("semantics.py"), &place.path("plain"));
    for after in ["0", "100000000"] {
        let mut command = python("semantics.py");
        place.dress(&mut command);
        let with = output(command.env("TOMBOLO_SOCKETS_AFTER", after), &place.path("with"));
        assert_eq!(plain, with, "joined after {after} bytes");
    }
    assert!(place.log().matches("joined").count() > 20, "{}", place.log());
    place.assert_tidy();
}

#[test]
fn s1_s3_streams_that_move_to_and_fro_all_the_time_arrive_whole() {
    if !has("s1_s3_streams_that_move_to_and_fro_all_the_time_arrive_whole", &["python3"]) {
        return;
    }
    for (mode, pace) in [("level", "2000"), ("edge", "2000"), ("level", "300"), ("edge", "300")] {
        let place = Place::new();
        let mut command = python("echo.py");
        place.dress(command.arg(mode).arg("8000000").env("TOMBOLO_SOCKETS_FLIP_US", pace));
        assert_eq!(output(&mut command, &place.path("out")), "4 of 4\n", "{mode}, {pace} us: {}", place.log());
        let (tcp, shared) = place.received();
        assert!(tcp > 1_000_000 && shared > 1_000_000, "{tcp} over TCP, {shared} through shared memory");
        assert!(!place.log().contains("broken"), "{}", place.log());
        place.assert_tidy();
    }
}

#[test]
fn peer_that_is_killed_ends_reading_and_writing() {
    if !has("peer_that_is_killed_ends_reading_and_writing", &["python3"]) {
        return;
    }
    for _ in 0..10 {
        let place = Place::new();
        let mut command = python("killed.py");
        place.dress(&mut command);
        assert_eq!(output(&mut command, &place.path("out")), "reading ends\nwriting ends\n", "{}", place.log());
        assert!(place.received().1 > 0, "{}", place.log());
    }
}

#[test]
fn echoes_inside_one_process_go_through_shared_memory() {
    if !has("echoes_inside_one_process_go_through_shared_memory", &["python3"]) {
        return;
    }
    let place = Place::new();
    let mut command = python("echo.py");
    place.dress(command.arg("level").arg("100000000"));
    assert_eq!(output(&mut command, &place.path("out")), "4 of 4\n");
    // What was under way in socket buffers when it joined went over TCP.
    place.shared(800_000_000, 90).unwrap();
}

#[test]
fn loopback_that_is_switched_off_stays_on_tcp() {
    if !has("loopback_that_is_switched_off_stays_on_tcp", &["python3"]) {
        return;
    }
    let place = Place::new();
    let mut command = python("echo.py");
    place.dress(command.arg("level").arg("1000000").env("TOMBOLO_SOCKETS_LOOPBACK", "off"));
    assert_eq!(output(&mut command, &place.path("out")), "4 of 4\n");
    assert_eq!(place.received().1, 0);
    assert!(place.log().contains("switched off"), "{}", place.log());
}

const LEN: usize = 200 << 20;

/// A file from one namespace to the other by socat; `dress` prepares the two commands.
fn socat(place: &Place, namespaces: &Namespaces, dress: [bool; 2]) {
    let (from, to) = (place.path("from"), place.path("to"));
    let bytes = random_file(&from, LEN);
    let mut server = namespaces.command(0, "socat", &format!("-u TCP-LISTEN:9000 CREATE:{}", to.display()));
    let mut client = namespaces.command(1, "socat", &format!("-u FILE:{} TCP:{SERVER}:9000", from.display()));
    if dress[0] {
        place.dress(&mut server);
    }
    if dress[1] {
        place.dress(&mut client);
    }
    let mut server = Started::new(&mut server);
    namespaces.wait_for(9000);
    assert!(Started::new(&mut client).finish().success());
    assert!(server.finish().success());
    assert!(fs::read(&to).unwrap() == bytes, "the file differs");
}

#[test]
fn socat_between_namespaces_goes_through_shared_memory() {
    let test = "socat_between_namespaces_goes_through_shared_memory";
    let Some(namespaces) = has(test, &["socat", "ip"]).then(|| Namespaces::new(test)).flatten() else { return };
    let place = Place::new();
    socat(&place, &namespaces, [true, true]);
    place.shared(LEN as u64, 95).unwrap();
    place.assert_tidy();
}

#[test]
fn s8_socat_with_the_library_at_one_end_stays_on_tcp() {
    let test = "s8_socat_with_the_library_at_one_end_stays_on_tcp";
    let Some(namespaces) = has(test, &["socat", "ip"]).then(|| Namespaces::new(test)).flatten() else { return };
    for dress in [[true, false], [false, true]] {
        let place = Place::new();
        socat(&place, &namespaces, dress);
        assert_eq!(place.received().1, 0);
        place.assert_tidy();
    }
}

#[test]
fn canary_wrapper_that_does_nothing_fails_the_share() {
    let test = "canary_wrapper_that_does_nothing_fails_the_share";
    let Some(namespaces) = has(test, &["socat", "ip"]).then(|| Namespaces::new(test)).flatten() else { return };
    let place = Place::new();
    socat(&place, &namespaces, [false, false]);
    assert!(place.shared(LEN as u64, 95).is_err());
}

#[test]
fn iperf3_between_namespaces_goes_through_shared_memory_both_ways() {
    let test = "iperf3_between_namespaces_goes_through_shared_memory_both_ways";
    let Some(namespaces) = has(test, &["iperf3", "ip"]).then(|| Namespaces::new(test)).flatten() else { return };
    for reverse in ["", " -R"] {
        let place = Place::new();
        let mut server = namespaces.command(0, "iperf3", "-s -1");
        let mut client = namespaces.command(1, "iperf3", &format!("-c {SERVER} -n 1G{reverse}"));
        place.dress(&mut server);
        place.dress(&mut client);
        let mut server = Started::new(&mut server);
        namespaces.wait_for(5201);
        assert!(Started::new(&mut client).finish().success());
        assert!(server.finish().success());
        place.shared(1 << 30, 95).unwrap();
    }
}

#[test]
fn python_http_between_namespaces_goes_through_shared_memory() {
    let test = "python_http_between_namespaces_goes_through_shared_memory";
    let Some(namespaces) = has(test, &["python3", "ip"]).then(|| Namespaces::new(test)).flatten() else { return };
    let place = Place::new();
    fs::create_dir(place.path("www")).unwrap();
    let bytes = random_file(&place.path("www").join("file"), LEN);
    let python = python("fetch.py").get_program().to_str().unwrap().to_owned();
    let served = place.path("www");
    let arguments = format!("-m http.server 8000 --bind {SERVER} --directory {}", served.display());
    let mut server = namespaces.command(0, &python, &arguments);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/fetch.py");
    let to = place.path("to");
    let arguments = format!("{} http://{SERVER}:8000/file {}", script.display(), to.display());
    let mut client = namespaces.command(1, &python, &arguments);
    place.dress(&mut server);
    place.dress(&mut client);
    let mut server = Started::new(&mut server);
    namespaces.wait_for(8000);
    assert!(Started::new(&mut client).finish().success());
    server.terminate();
    assert!(fs::read(&to).unwrap() == bytes, "the file differs");
    place.shared(LEN as u64, 95).unwrap();
}

#[test]
fn s7_twin_connections_of_isolated_namespaces_keep_their_bytes_apart() {
    let test = "s7_twin_connections_of_isolated_namespaces_keep_their_bytes_apart";
    if !has(test, &["socat", "ip"]) {
        return;
    }
    let Some(twins) = Namespaces::new(test).zip(Namespaces::new(test)) else { return };
    let place = Place::new();
    let twins = [twins.0, twins.1];
    let payloads = [0, 1].map(|n| random_file(&place.path(&format!("from{n}")), LEN / 4 + n * 8));
    // The same addresses and ports in both, and one folder.
    let mut servers: Vec<_> = (0..2)
        .map(|n| {
            let to = place.path(&format!("to{n}"));
            let mut server = twins[n].command(0, "socat", &format!("-u TCP-LISTEN:9000 CREATE:{}", to.display()));
            place.dress(&mut server);
            Started::new(&mut server)
        })
        .collect();
    twins.iter().for_each(|one| one.wait_for(9000));
    let mut clients: Vec<_> = (0..2)
        .map(|n| {
            let from = place.path(&format!("from{n}"));
            let arguments = format!("-u FILE:{} TCP:{SERVER}:9000,sourceport=4000", from.display());
            let mut client = twins[n].command(1, "socat", &arguments);
            place.dress(&mut client);
            Started::new(&mut client)
        })
        .collect();
    for one in clients.iter_mut().chain(&mut servers) {
        assert!(one.finish().success());
    }
    for (n, payload) in payloads.iter().enumerate() {
        assert!(fs::read(place.path(&format!("to{n}"))).unwrap() == *payload, "twin {n}: {}", place.log());
    }
}
