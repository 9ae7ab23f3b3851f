// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Files that `make install` installs: the symbols, and a program built as a user builds one.

mod common;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use common::{Map, ROOT, has, must};

const VERSION: &str = "TOMBOLO_VCHAN_0.1";

fn prefix() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vchan-prefix");
        let _ = fs::remove_dir_all(&prefix);
        let mut make = Command::new("make");
        make.current_dir(ROOT).arg("install").arg(format!("PREFIX={}", prefix.display()));
        make.env_remove("CARGO_TARGET_DIR").env_remove("RUSTFLAGS").env_remove("DESTDIR");
        must(&mut make);
        prefix
    })
}

/// Returns the functions that a header declares: each declaration begins at the start of a line, and has the name
/// before its bracket.
fn declared(header: &str) -> BTreeSet<&str> {
    let code = header.lines().filter(|line| !line.starts_with([' ', '/', '#', '}', '*']) && line.contains('('));
    code.filter_map(|line| line.split('(').next()?.rsplit([' ', '*']).next()).collect()
}

fn mapped(map: &str) -> BTreeSet<&str> {
    map.lines().filter_map(|line| line.trim().strip_suffix(';')).filter(|name| *name != "*" && *name != "}").collect()
}

/// Returns the faults of the symbols that `nm -D --defined-only` shows.
fn faults(headers: &[&str], map: &str, nm: &str) -> Vec<String> {
    let declared: BTreeSet<&str> = headers.iter().flat_map(|header| declared(header)).collect();
    let mapped = mapped(map);
    let exported: BTreeSet<&str> =
        nm.lines().filter_map(|line| line.split(' ').nth(2)).filter(|it| *it != VERSION).collect();
    let expected: BTreeSet<String> = mapped.iter().map(|name| format!("{name}@@{VERSION}")).collect();
    let expected: BTreeSet<&str> = expected.iter().map(String::as_str).collect();
    let unequal = |what: &str, a: &BTreeSet<&str>, b: &BTreeSet<&str>| {
        a.symmetric_difference(b).map(|name| format!("{name}: {what}")).collect::<Vec<_>>()
    };
    [
        unequal("not in both the headers and the map", &declared, &mapped),
        unequal("not as the map says", &exported, &expected),
    ]
    .concat()
}

#[test]
fn symbols_are_those_of_the_headers_with_their_version_and_no_others() {
    let header = |name: &str| fs::read_to_string(prefix().join("include/tombolo/vchan").join(name)).unwrap();
    let (xen, qubes) = (header("libxenvchan.h"), header("libvchan.h"));
    let map = include_str!("../symbols.map");
    let library = prefix().join("lib/libtombolo-vchan.so");
    let nm = must(Command::new("nm").args(["-D", "--defined-only"]).arg(&library));
    assert_eq!(faults(&[&xen, &qubes], map, &nm), [""; 0]);
    assert_eq!(mapped(map).len(), 28);
    let dynamic = must(Command::new("readelf").arg("-d").arg(&library));
    assert!(dynamic.contains("soname: [libtombolo-vchan.so.0.1]"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");
}

#[test]
fn canary_every_kind_of_wrong_symbol_is_found() {
    let (header, map) =
        ("int a(struct x *x);\nvoid *b(int,\n        int);\n", "V {\nglobal:\n    a;\n    b;\nlocal:\n    *;\n};\n");
    let nm = "0 A TOMBOLO_VCHAN_0.1\n1 T a@@TOMBOLO_VCHAN_0.1\n2 T b@@TOMBOLO_VCHAN_0.1\n";
    assert_eq!(faults(&[header], map, nm), [""; 0]);
    for (header, map, nm) in [
        ("int a(void);\n", map, nm),
        (header, "    a;\n", nm),
        (header, map, "1 T a@@TOMBOLO_VCHAN_0.1\n2 T b\n"),
        (header, map, "1 T a@@TOMBOLO_VCHAN_0.1\n"),
    ] {
        assert!(!faults(&[header], map, nm).is_empty());
    }
}

#[test]
fn program_of_the_original_builds_with_what_pkg_config_says() {
    if !has("program_of_the_original_builds_with_what_pkg_config_says", "pkg-config") {
        return;
    }
    let mut flags = Command::new("pkg-config");
    flags.args(["--cflags", "--libs", "tombolo-vchan"]).env("PKG_CONFIG_PATH", prefix().join("lib/pkgconfig"));
    let map = Map::local();
    let program = map.0.path().join("xen");
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-D_DEFAULT_SOURCE", "-pthread", "-o"]).arg(&program);
    compile.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c/xen.c")).args(must(&mut flags).split_whitespace());
    must(compile.arg(format!("-Wl,-rpath,{}/lib", prefix().display())));
    must(Command::new(&program).env("TOMBOLO_VCHAN_CONF", map.0.path().join("vchan.conf")));
}
