//! A password is never shown: not by `Debug`, not in an error, not in a log at trace level, ours or a client library's.
//! Every store is opened with a canary for a password, in addresses that are right and wrong, at servers that are right,
//! wrong, gone and stopped; then everything that was said is searched for the canary.

use std::fmt::{Debug, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{LocalBoxFuture, join_all};
use lockkeeper::{Lockkeeper, Result};
use lockkeeper_core::{BootInstant, Expect, Fence, Grant, Page, Wait};
use lockkeeper_testkit::laws::{name, request, with};
use lockkeeper_testkit::servers::{
    self, EtcdOptions, PostgresOptions, RedisOptions, Server, ZooKeeperOptions,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Letters and digits only, so that it stands in an address as it is.
const CANARY: &str = "K4n4r13nv0g3l";
const SCHEMES: [&str; 15] = [
    "redis",
    "rediss",
    "redis+unix",
    "redis+sentinel",
    "rediss+sentinel",
    "redis+cluster",
    "rediss+cluster",
    "redlock",
    "redlocks",
    "postgres",
    "postgresql",
    "etcd",
    "etcds",
    "zk",
    "dynamodb",
];

/// Everything that was logged since it was emptied last, by any crate.
static LOGGED: Mutex<String> = Mutex::new(String::new());

fn logged() -> MutexGuard<'static, String> {
    LOGGED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps what is logged: `tracing` and `log`, every level.
struct Keep;

impl Visit for Keep {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        _ = write!(logged(), " {}={value:?}", field.name());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        _ = write!(logged(), " {}={value}", field.name());
    }
}

impl Subscriber for Keep {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn event(&self, event: &Event<'_>) {
        _ = write!(logged(), "\n{} {}", event.metadata().level(), event.metadata().target());
        event.record(&mut Keep);
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        _ = write!(logged(), "\nspan {}", span.metadata().name());
        span.record(&mut Keep);
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, values: &Record<'_>) {
        values.record(&mut Keep);
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

impl log::Log for Keep {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        _ = write!(logged(), "\n{} {} {}", record.level(), record.target(), record.args());
    }

    fn flush(&self) {}
}

/// The tests here share one log, so they take turns.
async fn listen() -> tokio::sync::MutexGuard<'static, ()> {
    static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        tracing::subscriber::set_global_default(Keep).unwrap();
        log::set_logger(&Keep).unwrap();
        log::set_max_level(log::LevelFilter::Trace);
    });
    let turn = TURN.lock().await;
    logged().clear();
    turn
}

/// Checks what was said, in every shape in which it is shown.
fn silent(story: &str, said: &(impl Debug + ?Sized)) {
    let said = format!("{said:?} {said:#?}");
    assert!(!said.contains(CANARY), "{story}: {said}");
}

fn log_is_silent(story: &str) {
    let log = std::mem::take(&mut *logged());
    let line = log.lines().find(|line| line.contains(CANARY));
    assert_eq!(line, None, "{story}: it was logged");
}

/// Opens a store, and fails; returns why.
async fn refused(url: &str) -> String {
    let opened = tokio::time::timeout(Duration::from_secs(60), Lockkeeper::open(url)).await;
    let error = opened.expect("it ends").err().unwrap_or_else(|| panic!("{url} was opened"));
    silent(url, &error);
    assert!(!error.to_string().contains(CANARY), "{url}: {error}");
    log_is_silent(url);
    error.to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addresses_that_are_wrong_are_not_repeated() {
    let _turn = listen().await;
    let shapes = [
        "me:@C@",
        "me:@C@/0",
        ":@C@",
        "me:@C@/x@h",
        "me:x/@C@@h",
        "me:x?@C@@h",
        "me:1/@C@@h",
        "me:1?@C@@h",
        "me:1?a=@C@@h",
        "me:p@ss/@C@@h",
        "me:p@ss?@C@@h",
        "me:@C@@",
        "me:@C@@h:0",
        "me:@C@@h:port",
        "me:@C@@[::1",
        "me:@C@%zz@h",
        "me:@C@@a,b/x?nonsense=1",
        "me:@C@@h,h,h/x?timeout=never",
        "me:@C@@h,h,h/x?poll=1ms",
        "me:@C@@h/?ca=/nowhere&cert=/nowhere",
        "me:%2F@C@@h:port",
        "me:%2F@C@@h,h,h/x?nonsense=1",
        "h,h,h/x?password=@C@",
        "h,h,h/x?@C@",
        "me:1?timeout=@C@@h",
        "h.invalid/x?sentinel_password=@C@&timeout=100ms",
        "h/x?sentinel_user=me&sentinel_password=@C@&nonsense=1",
        "h/x?sentinel_password=@C@%zz",
    ];
    for scheme in SCHEMES {
        for shape in shapes {
            refused(&format!("{scheme}://{}", shape.replace("@C@", CANARY))).await;
        }
    }
    for odd in
        ["@C@", ":@C@@h", "me:@C@@h", "@C@@h:1", "memory://me:@C@@h", "nosuch://me:@C@@h", "//me:@C@@h"]
    {
        refused(&odd.replace("@C@", CANARY)).await;
    }
}

/// A port at which no server listens.
fn closed_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// An address for each store at these hosts, with the canary for a password.
fn addresses(host: &str) -> Vec<String> {
    let urls = [
        "redis://me:@C@@H?timeout=500ms",
        "rediss://me:@C@@H?timeout=500ms",
        "redis+sentinel://me:@C@@H/m?timeout=500ms",
        "redis+cluster://me:@C@@H?timeout=500ms",
        "redlock://me:@C@@H,I,J?timeout=500ms",
        "postgres://me:@C@@H/db?timeout=500ms",
        "postgres://me:@C@@H/db?timeout=500ms&sslmode=require",
        "etcd://me:@C@@H?timeout=500ms",
        "etcds://me:@C@@H?timeout=500ms",
        "zk://me:@C@@H?timeout=500ms",
    ];
    let other = |nth: &str| host.replace("127.0.0.1", nth).replace("host.", &format!("{nth}.host."));
    let fill = |url: &str| {
        let url = url.replace(",I", &format!(",{}", other("127.0.0.2")));
        let url = url.replace(",J", &format!(",{}", other("127.0.0.3")));
        url.replace("@H", &format!("@{host}")).replace("@C@", &format!("{CANARY}@")).replace("@@", "@")
    };
    urls.iter().map(|url| fill(url)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_error_for_an_unreachable_server_has_no_password() {
    let _turn = listen().await;
    for host in [closed_port().to_string(), "host.invalid".to_owned()] {
        for url in addresses(&host) {
            refused(&url).await;
        }
    }
    // A server listens, and speaks another protocol.
    let web = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = web.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in web.incoming().flatten() {
            _ = std::io::Write::write_all(&mut &stream, b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    for url in addresses(&addr.to_string()) {
        refused(&url).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn options_do_not_show_it() {
    let _turn = listen().await;
    let fill = |url: &str| url.replace("@C@", &format!("{CANARY}@"));
    silent("redis", &lockkeeper_redis::Options::from_url(&fill("redis://me:@C@h")).unwrap());
    silent("redis", &lockkeeper_redis::Options::from_url(&fill("redis://me:@C@h")).unwrap().access);
    silent("sentinel", &lockkeeper_redis::Options::from_url(&fill("redis+sentinel://me:@C@h/m")).unwrap());
    let both = fill("redis+sentinel://me:@C@h/m?sentinel_user=me&sentinel_password=") + CANARY;
    silent("sentinels", &lockkeeper_redis::Options::from_url(&both).unwrap());
    silent("redlock", &lockkeeper_redlock::Options::from_url(&fill("redlock://me:@C@a,b,c")).unwrap());
    silent("postgres", &lockkeeper_postgres::Options::from_url(&fill("postgres://me:@C@h/db")).unwrap());
    silent("etcd", &lockkeeper_etcd::Options::from_url(&fill("etcd://me:@C@h")).unwrap());
    silent("zookeeper", &lockkeeper_zookeeper::Options::from_url(&fill("zk://me:@C@h")).unwrap());
    #[cfg(feature = "dynamodb")]
    silent(
        "dynamodb",
        &lockkeeper_dynamodb::Options::from_url(&fill("dynamodb://me:@C@region/table")).unwrap(),
    );
    silent("address", &lockkeeper_core::StoreUrl::parse(&fill("redis://me:@C@h")).unwrap());
}

/// Makes every call, while none can be answered: each ends with an error, or is given up.
async fn fail(story: &str, keeper: &Lockkeeper) {
    let store = keeper.store();
    let (name, asked) =
        (name("y"), with(request("y"), |request| request.wait = Wait::For(Duration::from_millis(300))));
    let grant = Grant {
        key: asked.key.clone(),
        fence: Fence::MIN,
        mode: asked.mode,
        ttl: asked.ttl,
        sent_at: BootInstant::default(),
        lease: asked.ttl,
    };
    let page = Page::FIRST;
    let builder = keeper.lock("z").ttl(Duration::from_secs(1)).wait(Duration::from_millis(300));
    let brief = Duration::from_secs(4);
    // Of what is no error only that it is none is shown: an answer cannot have the password in it.
    macro_rules! call {
        ($($call:expr),+ $(,)?) => {
            let calls: Vec<LocalBoxFuture<'_, Result<()>>> =
                vec![$(async { $call.await.map(|_| ()) }.boxed_local()),+];
            let ends = join_all(calls.into_iter().map(|call| tokio::time::timeout(brief, call))).await;
            let told = format!("{ends:?}");
            assert!(told.contains("Err"), "{story}: nothing failed: {told}");
            silent(story, &told);
        };
    }
    call! {
        store.acquire(&asked),
        builder.acquire(),
        store.renew(std::slice::from_ref(&grant)),
        store.release(&asked.key),
        store.inspect(&name),
        store.list("", &page),
        store.watch(""),
        store.revoke(&name, "why not"),
        store.break_lock(&name, "why not"),
        store.read(&name),
        store.write(&name, b"v", Expect::Any, None),
        store.delete(&name, Expect::Any),
        store.scan("", &page),
    }
}

/// Logs in with the canary, works, and loses the servers; then logs in with a canary that is wrong.
async fn use_up(story: &str, url: &str, servers: &mut [&mut Server], wrong: Option<String>) {
    let opened = Lockkeeper::open(url).await;
    let keeper = opened.unwrap_or_else(|error| panic!("{story}: {error}"));
    let guard =
        keeper.lock("x").ttl(Duration::from_secs(5)).try_acquire().await.unwrap().expect("it is free");
    silent(story, &keeper);
    silent(story, &guard);
    silent(story, &keeper.profile());
    servers.iter().for_each(|server| server.pause());
    fail(story, &keeper).await;
    servers.iter().for_each(|server| server.resume());
    tokio::task::block_in_place(|| servers.iter_mut().for_each(|server| server.kill9()));
    fail(story, &keeper).await;
    tokio::task::block_in_place(|| servers.iter_mut().for_each(|server| server.restart()));
    drop(guard);
    assert!(!logged().is_empty(), "{story}: a store that is used and loses its server logs something");
    log_is_silent(story);
    if let Some(url) = wrong {
        let told = refused(&url).await;
        assert!(!told.is_empty(), "{story}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_and_redlock_log_in_in_silence() {
    let _turn = listen().await;
    let with =
        || RedisOptions { extra: vec![("requirepass".into(), CANARY.into())], ..RedisOptions::default() };
    let Ok(mut server) = servers::redis(with()) else { return };
    let (Ok(mut second), Ok(mut third)) = (servers::redis(with()), servers::redis(with())) else { return };
    let hosts = format!("{},{},{}", server.addr(), second.addr(), third.addr());
    let redlock = format!("redlock://:{CANARY}@{hosts}?young_node=0s&node_timeout=500ms");
    let wrong = format!("redlock://:{CANARY}x@{hosts}?young_node=0s&node_timeout=500ms");
    use_up("redlock", &redlock, &mut [&mut server, &mut second, &mut third], Some(wrong)).await;
    let url = format!("redis://:{CANARY}@{}?timeout=500ms", server.addr());
    let wrong = format!("redis://me:{CANARY}x@{}", server.addr());
    use_up("redis", &url, &mut [&mut server], Some(wrong)).await;
}

/// Every node of a cluster, and the sentinels beside the server, are told a password.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clusters_and_sentinels_are_logged_in_to_in_silence() {
    let _turn = listen().await;
    let user = |addr: SocketAddr| {
        let rights = ["~*", "&*", "+@all"];
        let password = format!(">{CANARY}");
        let words = ["ACL", "SETUSER", "me", "on", password.as_str()].into_iter().chain(rights);
        servers::redis_call(addr, &words.collect::<Vec<_>>()).unwrap();
    };
    let Ok(mut cluster) = servers::redis_cluster(1) else { return };
    let node = cluster.addrs()[0];
    user(node);
    let url = |password: &str| format!("redis+cluster://me:{password}@{node}?timeout=500ms");
    let wrong = refused(&url(&format!("{CANARY}x"))).await;
    assert!(wrong.contains("WRONGPASS"), "{wrong}");
    use_up("cluster", &url(CANARY), &mut [cluster.node_mut(0)], None).await;

    let Ok(mut fleet) = servers::redis_sentinel(RedisOptions::default()) else { return };
    fleet.sentinels().into_iter().chain([fleet.pair.primary().addr()]).for_each(user);
    let sentinels: Vec<String> = fleet.sentinels().iter().map(ToString::to_string).collect();
    let (at, name) = (sentinels.join(","), servers::RedisSentinel::NAME);
    let url = |server: &str, sentinel: &str| {
        format!(
            "redis+sentinel://me:{server}@{at}/{name}?timeout=500ms&sentinel_user=me&sentinel_password={sentinel}"
        )
    };
    let wrong = format!("{CANARY}x");
    for url in [url(CANARY, &wrong), url(&wrong, CANARY)] {
        let wrong = refused(&url).await;
        assert!(wrong.contains("WRONGPASS"), "{wrong}");
    }
    use_up("sentinel", &url(CANARY, CANARY), &mut [fleet.pair.primary_mut()], None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_logs_in_in_silence() {
    let _turn = listen().await;
    for method in ["scram-sha-256", "password"] {
        let hba = vec![format!("host all app 127.0.0.1/32 {method}")];
        let Ok(mut server) = servers::postgres(PostgresOptions { hba, ..PostgresOptions::default() }) else {
            return;
        };
        // With the server's own client: the log of this process must not see what it says.
        let sql = format!("CREATE ROLE app LOGIN SUPERUSER PASSWORD '{CANARY}'");
        let (host, port) = (server.addr().ip().to_string(), server.addr().port().to_string());
        let psql =
            Command::new("psql").args(["-h", &host, "-p", &port, "-U", "postgres", "-qc", &sql]).status();
        assert!(psql.unwrap().success());
        let url = |password: &str| {
            format!("postgres://app:{password}@{}/postgres?timeout=500ms&poll=200ms&claim=2s", server.addr())
        };
        let (right, wrong) = (url(CANARY), url(&format!("{CANARY}x")));
        use_up(method, &right, &mut [&mut server], Some(wrong)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_logs_in_in_silence() {
    let _turn = listen().await;
    let Ok(mut server) = servers::etcd(EtcdOptions::default()) else { return };
    let endpoint = format!("--endpoints={}", server.addr());
    let user = format!("root:{CANARY}");
    for args in [&["user", "add", &user][..], &["user", "grant-role", "root", "root"], &["auth", "enable"]] {
        let done =
            Command::new("etcdctl").env("ETCDCTL_API", "3").arg(&endpoint).args(args).output().unwrap();
        assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
    }
    let url = format!("etcd://root:{CANARY}@{}?timeout=500ms", server.addr());
    let wrong = format!("etcd://root:{CANARY}x@{}?timeout=500ms", server.addr());
    use_up("etcd", &url, &mut [&mut server], Some(wrong)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zookeeper_logs_in_in_silence() {
    let _turn = listen().await;
    let Ok(mut server) = servers::zookeeper(ZooKeeperOptions::default()) else { return };
    let url = format!("zk://app:{CANARY}@{}/jobs?create=yes&timeout=1s", server.addr());
    let wrong = format!("zk://app:{CANARY}x@{}/jobs?timeout=1s", server.addr());
    use_up("zookeeper", &url, &mut [&mut server], Some(wrong)).await;
}

#[cfg(feature = "dynamodb")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dynamodb_signs_in_silence() {
    let _turn = listen().await;
    let Ok(mut server) = servers::moto() else { return };
    let at = |table: &str| {
        format!("dynamodb://key:{CANARY}@eu-central-1/{table}?endpoint=http://{}&timeout=1s", server.addr())
    };
    let (url, missing) = (at("locks"), at("nosuch"));
    lockkeeper::init(&url).await.unwrap();
    refused(&missing).await;
    use_up("dynamodb", &url, &mut [&mut server], None).await;
}
