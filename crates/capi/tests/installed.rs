// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `make install`, and how a user compiles, links and runs with the installed files.

mod common;

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use common::{PLAIN, has, must, pairs, prefix};

/// Returns the names in a text, found by `name`.
fn names<'a>(text: &'a str, name: impl Fn(&'a str) -> Option<&'a str>) -> BTreeSet<&'a str> {
    text.lines().filter_map(name).collect()
}

/// Returns the functions that a header declares.
fn declared(header: &str) -> BTreeSet<&str> {
    let code = |line: &&str| !line.starts_with([' ', '/', '#']) && line.ends_with(");");
    header.lines().filter(code).filter_map(|line| line.split('(').next()?.rsplit([' ', '*']).next()).collect()
}

/// Returns the functions that a symbol map names.
fn mapped(map: &str) -> BTreeSet<&str> {
    names(map, |line| line.trim().strip_suffix(';').filter(|name| name.starts_with("tombolo_")))
}

/// Returns the faults of the symbols that `nm -D --defined-only` shows.
fn faults(header: &str, map: &str, nm: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let (declared, mapped) = (declared(header), mapped(map));
    for name in declared.symmetric_difference(&mapped) {
        faults.push(format!("{name}: not in both the header and the map"));
    }
    let exported = names(nm, |line| line.split(' ').nth(2).filter(|name| *name != "TOMBOLO_0.1"));
    let expected: BTreeSet<String> = mapped.iter().map(|name| format!("{name}@@TOMBOLO_0.1")).collect();
    for name in exported.iter().filter(|name| !expected.contains(**name)) {
        faults.push(format!("{name}: exported, but not in the map"));
    }
    for name in expected.iter().filter(|name| !exported.contains(name.as_str())) {
        faults.push(format!("{name}: not exported"));
    }
    faults
}

fn map() -> String {
    fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/symbols.map")).unwrap()
}

#[test]
fn installed_files_are_those_and_no_others() {
    let mut found = BTreeSet::new();
    let folders = [
        "bin",
        "include",
        "include/tombolo/vchan",
        "lib",
        "lib/pkgconfig",
        "lib/systemd/system",
        "lib/tombolo",
        "share/tombolo",
    ];
    for folder in folders {
        for entry in fs::read_dir(prefix().join(folder)).unwrap() {
            let entry = entry.unwrap();
            if !entry.file_type().unwrap().is_dir() {
                found.insert(format!("{folder}/{}", entry.file_name().display()));
            }
        }
    }
    let library = format!("lib/libtombolo.so.{}", env!("CARGO_PKG_VERSION"));
    let vchan = format!("lib/libtombolo-vchan.so.{}", env!("CARGO_PKG_VERSION"));
    let expected = [
        "bin/tombolo",
        "bin/tombolod",
        "include/tombolo.h",
        "include/tombolo/vchan/libvchan.h",
        "include/tombolo/vchan/libxenvchan.h",
        "lib/libtombolo-vchan.a",
        "lib/libtombolo-vchan.so",
        "lib/libtombolo-vchan.so.0.1",
        &vchan,
        "lib/libtombolo.a",
        "lib/libtombolo.so",
        "lib/libtombolo.so.0.1",
        &library,
        "lib/pkgconfig/tombolo-vchan.pc",
        "lib/pkgconfig/tombolo.pc",
        "lib/systemd/system/tombolo-holder.service",
        "lib/systemd/system/tombolo-hook.service",
        "lib/systemd/system/tombolo-net.service",
        "lib/systemd/system/tombolod-guest.service",
        "lib/systemd/system/tombolod.service",
        "lib/tombolo/libtombolo_preload.so",
        "share/tombolo/tombolod.toml",
    ];
    assert!(found.iter().eq(expected.iter().copied()), "{found:?}");
    for link in ["lib/libtombolo.so", "lib/libtombolo.so.0.1"] {
        assert_eq!(prefix().join(link).canonicalize().unwrap(), prefix().join(&library).canonicalize().unwrap());
    }
    for page in ["man/man1/tombolo.1", "man/man1/tombolo-cat.1", "bash-completion/completions/tombolo"] {
        assert!(prefix().join("share").join(page).is_file(), "{page}");
    }
    let broker = prefix().join("bin/tombolod");
    let unit = fs::read_to_string(prefix().join("lib/systemd/system/tombolod.service")).unwrap();
    assert!(unit.contains(&format!("ExecStart={} ", broker.display())) && !unit.contains("/usr/bin"), "{unit}");
    must(Command::new(broker).arg("--check").arg(prefix().join("share/tombolo/tombolod.toml")));
    must(Command::new(prefix().join("bin/tombolo")).arg("--version"));
    must(Command::new(prefix().join("bin/tombolo")).args(["run", "--", "true"]));
}

#[test]
fn destdir_goes_before_the_prefix_and_into_no_file() {
    let stage = Path::new(env!("CARGO_TARGET_TMPDIR")).join("installed-stage");
    let mut make = Command::new("make");
    make.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).args(["install", "PREFIX=/opt/tombolo"]);
    prefix(); // built once, by one
    must(make.arg(format!("DESTDIR={}", stage.display())));
    let pc = fs::read_to_string(stage.join("opt/tombolo/lib/pkgconfig/tombolo.pc")).unwrap();
    assert!(pc.contains("prefix=/opt/tombolo\n") && !pc.contains("installed-stage"), "{pc}");
    fs::remove_dir_all(stage).unwrap();
}

#[test]
fn symbols_are_those_of_the_map_with_their_version_and_no_others() {
    let header = fs::read_to_string(prefix().join("include/tombolo.h")).unwrap();
    let nm = must(Command::new("nm").args(["-D", "--defined-only"]).arg(prefix().join("lib/libtombolo.so")));
    assert!(declared(&header).len() > 30, "{:?}", declared(&header));
    assert_eq!(faults(&header, &map(), &nm), [""; 0]);
    let dynamic = must(Command::new("readelf").arg("-d").arg(prefix().join("lib/libtombolo.so")));
    assert!(dynamic.contains("soname: [libtombolo.so.0.1]"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
}

#[test]
fn canary_every_kind_of_wrong_symbol_is_found() {
    let header = "int tombolo_a(void);\nconst char *tombolo_b(void);\n";
    let map = "    tombolo_a;\n    tombolo_b;\n    *;\n";
    let nm = "0 A TOMBOLO_0.1\n1 T tombolo_a@@TOMBOLO_0.1\n2 T tombolo_b@@TOMBOLO_0.1\n";
    assert_eq!(faults(header, map, nm), [""; 0]);
    for (header, map, nm, fault) in [
        ("int tombolo_a(void);\n", map, nm, "tombolo_b: not in both"),
        (header, map, "1 T tombolo_a@@TOMBOLO_0.1\n2 T tombolo_b\n", "tombolo_b: exported, but"),
        (header, map, &nm[..nm.rfind('2').unwrap()], "tombolo_b@@TOMBOLO_0.1: not exported"),
        (header, map, &format!("{nm}3 T rust_eh_personality\n"), "rust_eh_personality: exported, but"),
    ] {
        let found = faults(header, map, nm);
        assert!(found.iter().any(|found| found.starts_with(fault)), "{fault}: not in {found:?}");
    }
}

#[test]
fn header_compiles_as_cxx_and_links() {
    const NAME: &str = "header_compiles_as_cxx_and_links";
    if has(NAME, "pkg-config") && has(NAME, "c++") {
        PLAIN.run(&PLAIN.program("plus.cc"), &[]);
    }
}

#[test]
fn program_links_with_the_archive_as_well() {
    if !has("program_links_with_the_archive_as_well", "pkg-config") {
        return;
    }
    let place = common::Place::new();
    let program = place.path("calls");
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-D_DEFAULT_SOURCE", "-pthread", "-o"]).arg(&program);
    compile.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c/calls.c"));
    compile.args(common::pkg_config("--cflags")).arg(prefix().join("lib/libtombolo.a"));
    must(compile.args(common::pkg_config("--libs-only-l --static").iter().filter(|word| *word != "-ltombolo")));
    PLAIN.run(&program, &[&place.address()]);
}

#[test]
fn examples_say_how_they_are_used() {
    if !has("examples_say_how_they_are_used", "pkg-config") {
        return;
    }
    let folder = PLAIN.examples();
    for name in ["echo", "copy", "sum", "chat"] {
        let (code, out, said) = PLAIN.start(&folder.join(name), &["what?"]).ends();
        assert!(code == Some(2) && out.is_empty() && said.starts_with(&format!("usage: {name} ")), "{said}");
    }
    let nowhere = PLAIN.start(&folder.join("echo"), &["serve", "nowhere"]).fails(1);
    assert!(nowhere.contains("is no address"), "{nowhere}");
    let no_file = PLAIN.start(&folder.join("copy"), &["send", "local:x", "/no/such/file"]).fails(2);
    assert_eq!(no_file, "/no/such/file: No such file or directory");
}

/// Returns the first block of a page in a language.
fn block<'a>(page: &'a str, language: &str) -> &'a str {
    let from = page.split_once(&format!("\n```{language}\n")).unwrap().1;
    &from[..from.find("```").unwrap()]
}

#[test]
fn guide_can_be_followed_to_the_letter() {
    if !has("guide_can_be_followed_to_the_letter", "pkg-config") {
        return;
    }
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/guide/c.md")).unwrap();
    let program = page.find("## A first program").unwrap();
    let place = common::Place::new();
    fs::write(place.path("hello.c"), block(&page[program..], "c")).unwrap();
    let commands = block(&page[program..], "sh").replace("local:/tmp/hello.sock", &place.address());
    let mut shell = Command::new("sh");
    shell.args(["-e", "-c", &commands]).current_dir(place.path(""));
    let said = must(shell.env("PKG_CONFIG_PATH", prefix().join("lib/pkgconfig")));
    assert_eq!(said, "good morning\n");
}

macro_rules! pairs {
    ($($name:ident: $pair:ident;)*) => {$(
        #[test]
        fn $name() {
            if has(stringify!($name), "pkg-config") {
                pairs::$pair(&PLAIN);
            }
        }
    )*};
}

pairs! {
    echo_of_a_stream_comes_back: echo;
    file_copied_without_a_buffer_is_the_same: copy;
    requests_are_answered: sum;
    many_peers_in_one_poll_loop_hear_each_other: chat;
    sender_killed_in_mid_transfer_is_not_an_end_of_file: killed_sender;
    receiver_killed_in_mid_transfer_ends_the_sender: killed_receiver;
    calls_do_and_refuse_what_the_header_says: calls;
    handle_is_read_and_written_by_two_threads: threads;
    growing_stream_that_a_child_inherits_loses_nothing: fork;
}
