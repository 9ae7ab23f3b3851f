// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Web servers in front of others, with kept connections, and a database with a thread for each client: all with the
//! library, and with the same answers as without it.

mod place;

use std::{fs, process::Command};

use place::{
    Place, SERVER, has, output,
    world::{World, interpreter, script},
};

/// A user without rights.
const NOBODY: u32 = 65534;

/// Requests the page of each number below `count`, eight at a time over kept connections, and a long page: each answer
/// must be right.
fn ask_for_pages(world: &World, port: u16, count: usize) {
    let (port, count) = (port.to_string(), count.to_string());
    let said = world.ask(&[&interpreter(), &script("pages.py"), SERVER, &port, &count]);
    assert_eq!(said, format!("right: {count} of {count}\n"), "{}", world.place.log());
}

/// Asserts that at least `percent` per cent of all bytes went through shared memory.
fn assert_shared(world: &World, percent: u64) {
    let (tcp, shared) = world.place.received();
    world.place.shared(tcp + shared, percent).unwrap();
}

#[test]
fn nginx_before_php_fpm_with_kept_connections_gives_each_answer() {
    let test = "nginx_before_php_fpm_with_kept_connections_gives_each_answer";
    let Some(world) = World::new(test, &["nginx", "php-fpm8.2"], Place::new) else { return };
    let page = world.file("page.php", "<?php $n = (int)$_GET['n']; echo str_repeat(md5((string)$n), 1 + $n % 997);\n");
    let pool = format!(
        "[global]\nerror_log = {}\ndaemonize = no\n[www]\nlisten = {SERVER}:9000\npm = static\npm.max_children = 20\n",
        world.text("php.log")
    );
    let pool = world.file("php.conf", &pool);
    let mut php = world.serve(9000, &["php-fpm8.2", "-n", "-R", "-F", "-y", &pool]);
    let nginx = format!(
        "daemon off; user root; worker_processes 2; pid {}; error_log stderr; events {{ worker_connections 1024; }}\n\
         http {{ access_log off; upstream php {{ server {SERVER}:9000; keepalive 8; }}\n\
         server {{ listen {SERVER}:8080; location / {{ fastcgi_pass php; fastcgi_keep_conn on;\n\
         fastcgi_param SCRIPT_FILENAME {page}; fastcgi_param QUERY_STRING $query_string;\n\
         fastcgi_param REQUEST_METHOD $request_method; }} }} }}\n",
        world.text("nginx.pid")
    );
    let nginx = world.file("nginx.conf", &nginx);
    let mut nginx = world.serve(8080, &["nginx", "-c", &nginx, "-p", &world.text("")]);
    ask_for_pages(&world, 8080, 2000);
    nginx.terminate();
    php.terminate();
    assert_shared(&world, 80);
}

#[test]
fn apache_event_before_gunicorn_gives_each_answer() {
    let test = "apache_event_before_gunicorn_gives_each_answer";
    let Some(world) = World::new(test, &["apache2", "gunicorn"], Place::new) else { return };
    world.file(
        "pages.py",
        "import hashlib, urllib.parse\n\
         def page(environ, start):\n\
         \x20   n = int(urllib.parse.parse_qs(environ['QUERY_STRING'])['n'][0])\n\
         \x20   text = hashlib.md5(str(n).encode()).hexdigest().encode() * (1 + n % 997)\n\
         \x20   start('200 OK', [('Content-Length', str(len(text)))])\n\
         \x20   return [text]\n",
    );
    let bind = format!("{SERVER}:9000");
    let folder = world.text("");
    let words =
        ["gunicorn", "-b", &bind, "-k", "gthread", "-w", "2", "--threads", "8", "--chdir", &folder, "pages:page"];
    let mut gunicorn = world.serve(9000, &words);
    let modules: String = ["mpm_event", "authz_core", "proxy", "proxy_http"]
        .map(|name| format!("LoadModule {name}_module /usr/lib/apache2/modules/mod_{name}.so\n"))
        .concat();
    let apache = format!(
        "ServerName one\nServerRoot {folder}\nListen {SERVER}:8080\nPidFile {folder}/apache.pid\nErrorLog {folder}/apache.log\n\
         {modules}User nobody\nGroup nogroup\nKeepAlive On\nMaxKeepAliveRequests 0\nMutex posixsem\n\
         ProxyPass / http://{SERVER}:9000/ keepalive=On\n"
    );
    // Its children run as nobody, and so does the other server: the folder must be open to all users.
    fs::write(world.place.path("meet/tombolo.conf"), format!("users = 0 {NOBODY}\n")).unwrap();
    for name in ["meet", "reports"] {
        fs::set_permissions(world.place.path(name), std::os::unix::fs::PermissionsExt::from_mode(0o1777)).unwrap();
    }
    fs::set_permissions(world.place.path(""), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    fs::write(world.place.path("log"), "").unwrap();
    fs::set_permissions(world.place.path("log"), std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    let apache = world.file("apache.conf", &apache);
    let mut apache = world.serve(8080, &["apache2", "-f", &apache, "-D", "FOREGROUND"]);
    ask_for_pages(&world, 8080, 1000);
    apache.terminate();
    gunicorn.terminate();
    assert_shared(&world, 50);
}

/// Runs queries whose answers are checked, with one server thread for each connection or with its thread pool.
fn mariadb(test: &str, handling: &str, threads: &str) {
    if !has(test, &["sysbench", "mariadb-install-db"]) {
        return;
    }
    let Some(world) = World::new(test, &["mariadbd", "mariadb"], Place::new) else { return };
    let (folder, socket) = (world.text("base"), world.text("socket"));
    // A folder of its own: a server that starts deletes what others have there.
    let scratch = world.text("scratch");
    fs::create_dir(&folder).unwrap();
    fs::create_dir(&scratch).unwrap();
    let made = Command::new("mariadb-install-db")
        .env("TMPDIR", &scratch)
        .args(["--no-defaults", "--user=root", "--auth-root-authentication-method=normal", "--skip-test-db"])
        .arg(format!("--datadir={folder}"))
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let words = [
        "mariadbd",
        "--no-defaults",
        "--user=root",
        &format!("--datadir={folder}"),
        &format!("--socket={socket}"),
        &format!("--tmpdir={scratch}"),
        &format!("--bind-address={SERVER}"),
        "--skip-name-resolve",
        "--innodb-flush-log-at-trx-commit=0",
        &format!("--thread-handling={handling}"),
    ];
    let mut server = world.serve(3306, &words);
    let grant = "create database sbtest; create user 'bench'@'10.77.0.2'; grant all on sbtest.* to 'bench'@'10.77.0.2'";
    let mut plain = Command::new("mariadb");
    output(plain.args(["--no-defaults", "-uroot", "-S", &socket, "-e", grant]), &world.place.path("granted"));
    let bench = |threads: &str, more: &[&str]| {
        let common =
            ["--db-driver=mysql", "--mysql-user=bench", "--mysql-db=sbtest", "--tables=2", "--table-size=2000"];
        let (host, threads) = (format!("--mysql-host={SERVER}"), format!("--threads={threads}"));
        world.ask(&[&["sysbench", "oltp_read_write"], &common[..], &[&host, &threads], more].concat())
    };
    bench("2", &["prepare"]);
    for threads in threads.split(' ') {
        let said = bench(threads, &["--events=1000", "--time=0", "--skip-trx=on", "--delete-inserts=0", "run"]);
        assert!(said.contains("transactions:                        1000 "), "{said}");
    }
    // Each event updates two rows of one table; the number of rows does not change.
    let sums = "select count(*), sum(id) from sbtest1; select count(*), sum(id) from sbtest2";
    let said = world.ask(&["mariadb", "--no-defaults", "-ubench", "-h", SERVER, "-N", "-e", sums, "sbtest"]);
    assert_eq!(said, "2000\t2001000\n2000\t2001000\n");
    server.terminate();
    assert_shared(&world, 80);
}

/// Returns the numbers of connections.
fn threads() -> &'static str {
    if std::env::var_os("TOMBOLO_LONG").is_some() { "4 16 32 64 96" } else { "4 32" }
}

#[test]
fn mariadb_with_a_thread_for_each_connection_gives_each_answer() {
    let test = "mariadb_with_a_thread_for_each_connection_gives_each_answer";
    mariadb(test, "one-thread-per-connection", threads());
}

#[test]
fn mariadb_with_its_thread_pool_gives_each_answer() {
    mariadb("mariadb_with_its_thread_pool_gives_each_answer", "pool-of-threads", threads());
}
