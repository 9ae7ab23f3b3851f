// SPDX-License-Identifier: Apache-2.0 OR MIT
//! More real programs between two network namespaces, which need a larger setup: a database, ranks that compute
//! together, the sockets of a virtual machine, a server that confines itself.

#[macro_use]
mod place;

use std::{fs, os::unix::fs::PermissionsExt, process::Command};

use place::{
    LONG, Place, SERVER, Started, find, random_file, wait_until,
    world::{CLIENTS, SERVERS, World, echo, number_after, script},
};

/// A user without rights.
const NOBODY: u32 = 65534;

fn program(name: &str) -> String {
    find(name).unwrap().to_str().unwrap().to_owned()
}

// ---- PostgreSQL

/// Returns a command line that runs as a user without rights. PostgreSQL does not run as root, and all endpoints that
/// meet in one folder belong to one user.
fn as_nobody(words: &[&str]) -> Vec<String> {
    let mut all: Vec<String> = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"].map(Into::into).into();
    all.push(program(words[0]));
    all.extend(words[1..].iter().map(|&word| word.to_owned()));
    all
}

/// Namespaces for PostgreSQL: a killed server leaves named memory behind, which here is freed with its processes.
const APART: [&str; 6] =
    ["unshare", "--ipc", "--mount", "sh", "-c", "mount -t tmpfs none /dev/shm && exec \"$0\" \"$@\""];

/// Returns the number of PostgreSQL's memory objects that are visible to all.
fn left_in_memory() -> usize {
    let names = fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().file_name());
    let segments = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
    names.filter(|name| name.to_string_lossy().starts_with("PostgreSQL")).count() + segments.lines().count()
}

fn sql(world: &World, client: &str, more: &[&str]) -> String {
    let words = as_nobody(&[&[client, "-h", SERVER, "-U", "keeper"], more, &["postgres"]].concat());
    world.ask(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

/// PostgreSQL has a process for each client: transactions whose sums must agree, large answers, a table copied in and
/// out.
fn postgres(world: &World) -> u64 {
    let folder = world.text("base");
    world.give(NOBODY);
    // Without the library, because `initdb` makes no connections.
    let made = as_nobody(&["initdb", "-D", &folder, "-U", "keeper", "-A", "trust", "-N", "--no-locale", "-E", "UTF8"]);
    let made = Command::new(APART[0]).args(&APART[1..]).args(&made).current_dir("/").output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let rules = world.place.path("base/pg_hba.conf");
    fs::write(&rules, fs::read_to_string(&rules).unwrap() + "host all all 10.77.0.0/24 trust\n").unwrap();
    let server = as_nobody(&["postgres", "-D", &folder, "-h", SERVER, "-k", &world.text(""), "-F"]);
    let before = left_in_memory();
    let mut server = world.serve(5432, &APART.into_iter().chain(server.iter().map(String::as_str)).collect::<Vec<_>>());
    assert_eq!(left_in_memory(), before, "memory of PostgreSQL's that outlives it");
    // The server listens before it accepts clients.
    wait_until("the base is ready", || {
        fs::read_to_string(world.place.path("server-5432"))
            .is_ok_and(|said| said.contains("ready to accept connections"))
    });

    let times = 3000;
    sql(world, "pgbench", &["-i", "-q", "-s", "1"]);
    sql(world, "pgbench", &["-n", "-c", "8", "-j", "2", "-t", "100"]);
    let sums = "select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history), \
                (select sum(bbalance) from pgbench_branches) = (select sum(tbalance) from pgbench_tellers), \
                (select count(*) from pgbench_history)";
    assert_eq!(sql(world, "psql", &["-At", "-c", sums]).trim(), "t|t|800");
    let large = world.file("large.sql", "\\set n random(1, 20000)\nselect repeat(md5(:n::text), 60);\n");
    let said = sql(world, "pgbench", &["-n", "-f", &large, "-c", "8", "-j", "2", "-t", &times.to_string()]);
    assert!(said.contains(&format!("actually processed: {0}/{0}", 8 * times)), "{said}");

    let rows: String = (0..100_000).map(|n| format!("{n}\tthe words of line {n}, no two alike\n")).collect();
    let (from, to) = (world.file("rows", &rows), world.text("rows.out"));
    sql(world, "psql", &["-c", "create table rows (n int, words text)"]);
    sql(world, "psql", &["-c", &format!("\\copy rows from '{from}'")]);
    sql(world, "psql", &["-c", &format!("\\copy (select * from rows order by n) to '{to}'")]);
    assert!(fs::read_to_string(&to).unwrap() == rows, "the table came back otherwise");
    server.terminate();
    8 * times * 1920 + 2 * rows.len() as u64
}

// ---- Open MPI

/// Open MPI assumes two hosts: what it would start by ssh is started in the other namespace.
fn mpi(world: &World) -> u64 {
    let ranks = world.text("ranks");
    let made = Command::new("mpicc").args(["-O2", "-o", &ranks, &script("ranks.c")]).status().unwrap();
    assert!(made.success(), "mpicc: {made}");
    let there = world.namespaces.name(CLIENTS);
    let agent = world.file("agent", &format!("#!/bin/sh\nshift\nexec ip netns exec {there} sh -c \"$*\"\n"));
    fs::set_permissions(&agent, fs::Permissions::from_mode(0o700)).unwrap();
    let hosts = format!("{SERVER},10.77.0.2");
    let mut words = vec!["mpirun", "--allow-run-as-root", "--host", &hosts, "-np", "2"];
    let tcp = [["btl", "tcp,self"], ["pml", "ob1"], ["btl_tcp_if_include", "10.77.0.0/24"]];
    let start = [["plm", "rsh"], ["plm_rsh_agent", &agent], ["oob_tcp_if_include", "10.77.0.0/24"]];
    // Ranks poll without pause, so they must yield where there are few CPUs.
    for [name, value] in tcp.into_iter().chain(start).chain([["mpi_yield_when_idle", "1"]]) {
        words.extend(["--mca", name, value]);
    }
    words.extend([&ranks[..], if cfg!(debug_assertions) { "10" } else { "20" }]);
    let to = world.place.path("ranks.out");
    let said = place::output(&mut world.command(SERVERS, &words), &to);
    number_after(&said, "bytes:")
}

// ---- Java

fn java(world: &World) -> u64 {
    let script = script("Streams.java");
    let words = ["java", "-Xmx256m", &script];
    echo(world, &words, &words, 400_000_000)
}

// ---- OpenSSH

/// Copies files in both directions. The server's processes share a socket and confine themselves; they must not notice
/// anything.
fn scp(world: &World) {
    let sent = random_file(&world.place.path("file"), LONG);
    for key in ["key", "host"] {
        world.ask(&["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", &world.text(key)]);
    }
    let server = format!(
        "Port 2222\nListenAddress {SERVER}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nStrictModes no\n\
         UsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\nSubsystem sftp internal-sftp\n",
        world.text("host"),
        world.text("key.pub")
    );
    let client = format!(
        "Host there\nHostName {SERVER}\nPort 2222\nUser root\nIdentityFile {}\nIdentitiesOnly yes\nBatchMode yes\n\
         StrictHostKeyChecking no\nUserKnownHostsFile {}\nLogLevel ERROR\n",
        world.text("key"),
        world.text("known")
    );
    let (server, client) = (world.file("server.conf", &server), world.file("client.conf", &client));
    // The folder that sshd requires; a mount on /run in a namespace is visible only there.
    let run = format!("mount -t tmpfs none /run && mkdir /run/sshd && exec {} -D -e -f {server}", program("sshd"));
    let mut server = world.serve(2222, &["sh", "-c", &run]);
    let (file, copy) = (world.text("file"), world.text("copy"));
    let (there_file, there_copy) = (format!("there:{file}"), format!("there:{copy}"));
    for [from, to] in [[&file, &there_copy], [&there_file, &copy]] {
        world.ask(&["scp", "-q", "-F", &client, from, to]);
        assert!(fs::read(&copy).unwrap() == sent, "{from} to {to}: the file differs");
        fs::remove_file(&copy).unwrap();
    }
    // A program whose output comes over the connection.
    let out = fs::File::create(&copy).unwrap();
    let mut cat = world.command(CLIENTS, &["ssh", "-F", &client, "there", &format!("cat {file}")]);
    assert!(Started::new(cat.stdout(out)).finish().success());
    assert!(fs::read(&copy).unwrap() == sent, "the file differs");
    server.terminate();
}

// ---- systemd

/// Returns systemd's messages about the guide's drop-in, changed by `change`. systemd prints nothing for a correct
/// unit, but may report faults of other units of this machine.
fn verdict(change: impl Fn(&str) -> String) -> String {
    let guide = include_str!("../../../../docs/guide/sockets.md");
    let drop_in = guide.split("```").find(|block| block.contains("tombolo.conf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let unit = folder.path().join("one.service");
    fs::write(&unit, "[Service]\nExecStart=/bin/true\n").unwrap();
    fs::create_dir(folder.path().join("one.service.d")).unwrap();
    fs::write(folder.path().join("one.service.d/tombolo.conf"), change(drop_in)).unwrap();
    let said = Command::new("systemd-analyze").arg("verify").arg(&unit).output().unwrap();
    String::from_utf8_lossy(&said.stderr).lines().filter(|line| line.contains("one.service")).collect()
}

#[test]
fn drop_in_of_the_guide_is_one_that_systemd_takes() {
    if place::has("drop_in_of_the_guide_is_one_that_systemd_takes", &["systemd-analyze"]) {
        assert_eq!(verdict(str::to_owned), "");
    }
}

#[test]
fn canary_drop_in_that_says_nonsense_is_named() {
    if place::has("canary_drop_in_that_says_nonsense_is_named", &["systemd-analyze"]) {
        for nonsense in ["ENOSUCH", "0x\nRuntimeDirectoryMode=z"] {
            let said = verdict(|drop_in| drop_in.replace("ENOSYS", nonsense));
            assert!(said.contains("tombolo.conf"), "{nonsense}: {said:?}");
        }
    }
}

correct! {
    openssh_copies_files_both_ways, ["scp", "sshd", "ssh-keygen", "mount"], scp;
}

accelerated! {
    postgresql_goes_through_shared_memory, ["initdb", "pgbench", "psql", "setpriv", "unshare"], postgres;
    open_mpi_goes_through_shared_memory, ["mpirun", "mpicc"], mpi;
    java_goes_through_shared_memory, ["java", "javac"], java;
}
