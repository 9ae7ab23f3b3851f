// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reports of programs' processes: a line for each connection at its end, faults of the folder where endpoints meet,
//! and the reasons why connections are not joined.

mod place;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
};

use place::{Place, has, python};
use tombolo_sockets::switched::{self, Name};

/// `steps.py`, which makes a connection on request.
struct Steps {
    child: Child,
    said: BufReader<ChildStdout>,
    port: u16,
}

impl Steps {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        Self { child, said, port: line.trim().parse().unwrap() }
    }

    fn step(&mut self, step: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{step}").unwrap();
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        assert_eq!(line, "done\n", "{step}");
    }

    fn end(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn dressed(place: &Place, more: &[(&str, &str)]) -> Steps {
    let mut command = python("steps.py");
    place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0").envs(more.iter().copied()));
    Steps::start(command)
}

/// Returns the lines of the log that contain `what`.
fn lines(place: &Place, what: &str) -> Vec<String> {
    place.log().lines().filter(|line| line.contains(what)).map(str::to_owned).collect()
}

#[test]
fn each_connection_has_a_line_at_its_end_that_says_how_it_was_carried() {
    if !has("each_connection_has_a_line_at_its_end_that_says_how_it_was_carried", &["python3"]) {
        return;
    }
    let place = Place::new();
    let mut steps = dressed(&place, &[]);
    let ended = |place: &Place| lines(place, " ended").len();
    steps.step("talk");
    let told = lines(&place, " ended: sent ");
    assert_eq!((told.len(), ended(&place)), (2, 2), "{}", place.log());
    for line in told {
        let numbers: Vec<u64> = line.split([' ', ',']).filter_map(|word| word.parse().ok()).collect();
        let [sent_shared, sent_tcp, received_shared, received_tcp] = numbers[numbers.len() - 4..] else {
            panic!("{line}")
        };
        assert_eq!((sent_shared + sent_tcp, received_shared + received_tcp), (100_000, 100_000), "{line}");
        assert!(sent_shared > 50_000, "{line}");
    }
    steps.step("none");
    let told = lines(&place, "always on TCP (it ended before enough had passed");
    assert_eq!((told.len(), ended(&place)), (2, 4), "{}", place.log());
    assert!(told.iter().all(|line| line.ends_with("sent 0, received 0")), "{}", place.log());
    // A peer without the library.
    let server = Command::new("/usr/bin/python3")
        .args(["-uc", ECHO])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut server = Echo(server);
    let mut port = String::new();
    BufReader::new(server.0.stdout.as_mut().unwrap()).read_line(&mut port).unwrap();
    steps.step(&format!("at 127.0.0.1 {}", port.trim()));
    let told = lines(&place, "always on TCP (the other end did not claim it");
    assert_eq!((told.len(), ended(&place)), (1, 5), "{}", place.log());
    assert!(told[0].ends_with("sent 100000, received 100000"), "{}", place.log());
    steps.end();
    assert_eq!(ended(&place), 5, "{}", place.log());
}

/// Echoes the bytes of one client.
const ECHO: &str = "
import socket
listener = socket.create_server(('127.0.0.1', 0))
print(listener.getsockname()[1])
end, _ = listener.accept()
while data := end.recv(65536):
    end.sendall(data)
";

struct Echo(Child);

impl Drop for Echo {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn s7_folder_that_cannot_be_used_is_named_once_with_the_error() {
    let test = "s7_folder_that_cannot_be_used_is_named_once_with_the_error";
    if !has(test, &["python3", "setpriv", "unshare", "mount"]) || !rustix::process::geteuid().is_root() {
        return;
    }
    // The name, the change to the folder, the words before the program, and the expected message.
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    type Change = fn(&Path);
    let cases: [(&str, Change, &[&str], &str); 5] = [
        ("gone", |folder| fs::remove_dir(folder).unwrap(), &[], "No such file or directory (os error 2)"),
        ("open", |folder| mode(folder, 0o777), &[], "others may write to it (mode 777)"),
        ("foreign", |_| {}, &nobody, "it belongs to user 0"),
        ("denied", |folder| mode(folder.parent().unwrap(), 0o700), &nobody, "Permission denied (os error 13)"),
        ("read-only", |_| {}, &["sh", "-c", READ_ONLY], "Read-only file system (os error 30)"),
    ];
    for (name, change, before, wanted) in cases {
        let place = Place::new();
        // The log is writable by any user that runs there, and the folder is below one that can be closed.
        let (closed, log) = (place.path("closed"), place.path("log"));
        let folder = closed.join("meet");
        fs::create_dir_all(&folder).unwrap();
        fs::write(&log, "").unwrap();
        mode(&log, 0o666);
        mode(&place.path(""), 0o755);
        change(&folder);
        let script = python("steps.py");
        let words: Vec<_> = std::iter::once(script.get_program()).chain(script.get_args()).collect();
        let mut command = Command::new(before.first().map_or(words[0], |first| std::ffi::OsStr::new(*first)));
        if before.is_empty() {
            command.args(&words[1..]);
        } else {
            command.args(&before[1..]).args(&words);
        }
        place.dress(command.env("MEET", &folder).env("TOMBOLO_SOCKETS_AFTER", "0"));
        command.env("TOMBOLO_SOCKETS", &folder);
        let mut steps = Steps::start(command);
        (0..3).for_each(|_| steps.step("talk"));
        steps.end();
        let told = lines(&place, "connections stay on TCP: ");
        assert_eq!(told.len(), 1, "{name}: {}", place.log());
        assert!(told[0].contains(folder.to_str().unwrap()) && told[0].contains(wanted), "{name}: {}", told[0]);
        let each = lines(&place, "stays on TCP: the folder where ends meet can");
        assert_eq!(each.len(), 6, "{name}: {}", place.log());
    }
}

/// Runs a command where the folder is read-only.
const READ_ONLY: &str = "exec unshare -m sh -c 'mount --bind \"$MEET\" \"$MEET\" && mount -o remount,bind,ro \"$MEET\" && \
                         exec \"$0\" \"$@\"' \"$0\" \"$@\"";

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn s7_folder_that_goes_and_comes_back_is_used_again() {
    if !has("s7_folder_that_goes_and_comes_back_is_used_again", &["python3"]) {
        return;
    }
    let place = Place::new();
    let folder = place.path("meet");
    let mut steps = dressed(&place, &[]);
    let mut joined = 0;
    for (change, joins) in [
        ((|_| {}) as fn(&Path), true),
        (|folder| fs::remove_dir_all(folder).unwrap(), false),
        (|folder| fs::create_dir(folder).unwrap(), true),
        (|folder| mode(folder, 0o777), false),
        (|folder| mode(folder, 0o700), true),
        (|folder| fs::remove_dir_all(folder.join("claims")).unwrap(), true),
    ] {
        change(&folder);
        steps.step("talk");
        joined += if joins { 2 } else { 0 };
        assert_eq!(lines(&place, "joined").len(), joined, "{}", place.log());
    }
    assert_eq!(lines(&place, "connections stay on TCP: ").len(), 2, "{}", place.log());
    steps.end();
    place.assert_tidy();
}

#[test]
fn ports_that_are_left_alone_stay_on_tcp() {
    if !has("ports_that_are_left_alone_stay_on_tcp", &["python3"]) {
        return;
    }
    for (only, not, joins) in [
        ("", "", true),
        ("1-65535", "", true),
        ("1", "", false),
        ("", "1", true),
        ("", "1024-65535", false),
        ("nonsense", "", false),
    ] {
        let place = Place::new();
        let mut steps = dressed(&place, &[("TOMBOLO_SOCKETS_ONLY", only), ("TOMBOLO_SOCKETS_NOT", not)]);
        assert!(steps.port >= 1024);
        steps.step("talk");
        steps.end();
        assert_eq!(lines(&place, "joined").len(), if joins { 2 } else { 0 }, "{only:?} {not:?}: {}", place.log());
        let left = lines(&place, "stays on TCP: its port is left alone").len();
        assert_eq!(left, if joins { 0 } else { 2 }, "{only:?} {not:?}: {}", place.log());
    }
}

#[test]
fn s7_process_that_is_off_joins_nothing_until_it_is_on_again() {
    if !has("s7_process_that_is_off_joins_nothing_until_it_is_on_again", &["python3"]) {
        return;
    }
    let place = Place::new();
    let mut steps = dressed(&place, &[]);
    let folder: PathBuf = place.path("meet");
    let at = || fs::File::open(&folder).unwrap();
    let name = Name::of(steps.child.id()).unwrap().0;
    for (round, off) in [(1, false), (1, true), (2, false)] {
        if off {
            switched::put_file(at(), &name).unwrap();
        } else {
            assert_eq!(switched::remove_file(at(), &name, rustix::process::geteuid().as_raw()).unwrap(), round == 2);
        }
        steps.step("talk");
        assert_eq!(lines(&place, "joined").len(), 2 * round, "{}", place.log());
    }
    let off = lines(&place, "stays on TCP: `tombolo run --off`");
    assert!(!off.is_empty() && off.len() <= 2, "{}", place.log());
    steps.end();
}

#[test]
fn report_in_a_folder_of_others_follows_no_link() {
    if !has("report_in_a_folder_of_others_follows_no_link", &["python3"]) {
        return;
    }
    let place = Place::new();
    let mut steps = dressed(&place, &[]);
    let kept = place.path("kept");
    fs::write(&kept, "what a program keeps").unwrap();
    std::os::unix::fs::symlink(&kept, place.path("reports").join(format!("{}.json", steps.child.id()))).unwrap();
    steps.step("talk");
    steps.end();
    assert_eq!(fs::read_to_string(&kept).unwrap(), "what a program keeps");
}
