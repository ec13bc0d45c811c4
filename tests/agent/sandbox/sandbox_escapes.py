"""Ways out of the sandbox: each a statement that must fail, by an error or by the program's end.

Names that statements use are those of `PRELUDE`. ``{secret}`` is a file of the user with a text in
it, ``{folder}`` its folder, ``{parent}`` the process that runs the sandbox, ``{port}`` where a
server listens.
"""

from __future__ import annotations

PRELUDE = """
import ctypes, errno, importlib, io, mmap, os, posix, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result = libc.syscall(ctypes.c_long(number), *wide)
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result
def checked(result):
    if result in (-1, None):
        raise OSError(ctypes.get_errno(), "refused")
    return result
def machine_code(code, *arguments):
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    result = ctypes.CFUNCTYPE(ctypes.c_long)(address)()
    if -4096 < result < 0:
        raise OSError(-result, "refused")
    return result
"""

_READS = """
{secret}
{folder}/../{name}/secret
/etc/passwd
/etc/shadow
/etc/hosts
/etc/hostname
/proc/self/environ
/proc/self/cmdline
/proc/self/maps
/proc/self/mem
/proc/self/status
/proc/self/mountinfo
/proc/{parent}/environ
/proc/{parent}/cmdline
/proc/{parent}/mem
/proc/{parent}/maps
/proc/1/environ
/proc/net/tcp
/proc/version
/proc/cpuinfo
/proc/meminfo
/proc/sys/kernel/random/boot_id
/proc/keys
/proc/kmsg
/proc/kcore
/dev/mem
/dev/kmsg
/dev/tty
/dev/ptmx
/dev/zero
/dev/null
/dev/urandom
/sys/class/net/lo/address
/sys/kernel/notes
/proc/self/root/etc/passwd
/proc/self/cwd/../hidden
../hidden
/proc/thread-self/environ
/usr/bin/env
/bin/sh
/var/log/dpkg.log
/root/.bashrc
{package}/agent/sandbox.py
""".strip().splitlines()

_CHANGES = """
open({secret!r}, "w")
open({secret!r}, "a")
open({secret!r}, "r+")
open({folder!r} + "/new", "x")
open("new", "w")
open("/tmp/new", "w")
os.open({secret!r}, os.O_TRUNC)
os.open({secret!r}, os.O_CREAT)
os.open({folder!r}, os.O_TMPFILE + os.O_WRONLY)
os.open({folder!r}, os.O_TMPFILE + os.O_RDWR)
os.unlink({secret!r})
os.rmdir({folder!r})
os.rename({secret!r}, {secret!r} + "2")
os.replace({secret!r}, "/tmp/x")
os.link({secret!r}, "/tmp/linked")
os.link({secret!r}, "linked")
os.symlink("/", "linked")
os.mkdir("made")
os.mkfifo("made")
os.mknod("made")
os.chmod({secret!r}, 0o777)
os.chmod(".", 0o777)
os.chown({secret!r}, 0, 0)
os.utime({secret!r})
os.truncate({secret!r}, 0)
os.chdir("/")
os.chroot("/")
os.fchdir(0)
os.fchmod(0, 0o777)
os.ftruncate(1, 0)
os.setxattr({secret!r}, "user.x", b"y")
os.getxattr({secret!r}, "user.x")
os.listxattr({secret!r})
os.listdir({folder!r})
os.listdir("/")
os.listdir("/etc")
os.listdir("/tmp")
os.listdir("/proc")
os.listdir("/proc/self/fd")
os.listdir("..")
os.scandir({folder!r})
os.statvfs("/")
os.memfd_create("x")
os.posix_fallocate(1, 0, 9)
os.copy_file_range(0, 1, 9)
os.sendfile(1, 0, 0, 9)
os.splice(0, 1, 9)
open("/proc/self/oom_score_adj", "w")
open("/proc/self/uid_map", "w")
open("/proc/self/mem", "r+b")
open("/dev/shm/x", "w")
open("/dev/fuse", "r+b")
open("/proc/sys/kernel/core_pattern", "w")
open("/sys/fs/cgroup/cgroup.procs", "w")
os.open("/proc/self/fd/1", os.O_WRONLY)
importlib.import_module("numpy")
importlib.import_module("torch")
importlib.import_module("pytest")
""".strip().splitlines()

_PROCESSES = """
os.fork()
os.forkpty()
posix.posix_spawn("/bin/true", ["true"], {{}})
os.execv("/bin/true", ["true"])
os.execve(0, ["x"], {{}})
1 // (os.system("true") == 0)
checked(os.popen("true").read() or None)
importlib.import_module("subprocess").run(["/bin/true"])
checked(libc.vfork())
call(57)
call(58)
call(56, 17, 0, 0, 0, 0)
call(56, 0x4111, 0, 0, 0, 0)
call(435, struct.pack("8Q", *[0] * 8), 64)
call(59, b"/bin/true", 0, 0)
call(322, -100, b"/bin/true", 0, 0, 0)
checked(libc.daemon(1, 1))
importlib.import_module("multiprocessing").Process(target=print).start()
os.kill({parent}, 0)
os.kill({parent}, 9)
os.kill(os.getppid(), 9)
os.kill(-1, 9)
os.kill(0, 0)
os.kill(1, 0)
os.killpg(0, 0)
signal.pidfd_send_signal(0, 0)
os.pidfd_open({parent})
os.pidfd_open(os.getpid())
call(200, {parent}, 9)
call(234, {parent}, {parent}, 9)
call(129, {parent}, 9, 0)
os.setsid()
os.setpgid(0, 0)
os.getpgid({parent})
os.nice(-5)
os.nice(5)
os.setpriority(0, {parent}, 19)
os.sched_setaffinity(0, [0])
os.sched_setaffinity({parent}, [0])
os.sched_setscheduler(0, 3, os.sched_param(0))
call(101, 16, {parent}, 0, 0)
call(101, 0, 0, 0, 0)
call(310, {parent}, 0, 0, 0, 0, 0)
call(311, {parent}, 0, 0, 0, 0, 0)
call(312, {parent}, {parent}, 0, 0, 0)
call(438, 0, 0, 0)
call(448, 0, 0)
call(440, 0, 0, 0, 0, 0)
os.wait4({parent}, 0)
os.tcsetpgrp(0, 1)
os.getsid({parent})
""".strip().splitlines()

_RIGHTS = """
os.setuid(0)
os.setgid(0)
os.setresuid(0, 0, 0)
os.setreuid(0, 0)
os.setegid(0)
os.setgroups([])
os.initgroups("root", 0)
checked(libc.setfsuid(0) or None)
checked(libc.capset(None, None))
checked(libc.prctl(4, 1, 0, 0, 0))
checked(libc.prctl(38, 1, 0, 0, 0))
checked(libc.prctl(1, 0, 0, 0, 0))
checked(libc.prctl(22, 2, 0))
call(317, 1, 0, 0)
call(317, 1, 8, 0)
call(157, 15, b"renamed")
checked(libc.unshare(0x10000000))
checked(libc.unshare(0x00020000))
checked(libc.unshare(0x40000000))
checked(libc.setns(0, 0))
checked(libc.mount(b"none", b"/", b"tmpfs", 0, None))
checked(libc.umount(b"/"))
checked(libc.pivot_root(b".", b"."))
checked(libc.chroot(b"/"))
call(428, -100, b"/", 0)
call(429, -1, b"", -1, b"", 0)
call(430, b"tmpfs", 0)
call(441, 0, 0)
call(444, 0, 0, 1)
call(446, 3, 0)
call(175, 0, 0, 0)
call(313, 0, b"", 0)
call(321, 0, 0, 0)
call(298, 0, 0, -1, -1, 0)
call(323, 0)
call(425, 8, 0)
call(426, 0, 1, 0, 0, 0, 0)
call(246, 0, 0, 0, 0)
call(169, 0, 0, 0, 0)
call(170, b"x", 1)
call(164, 0, 0)
call(227, 0, 0)
call(159, 0)
call(248, b"user", b"x", b"y", 1, 0)
call(250, 0, 0)
call(249, b"user", b"x", 0, 0)
call(135, 0x0040000)
resource.setrlimit(resource.RLIMIT_CPU, (99, 99))
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
resource.setrlimit(resource.RLIMIT_NPROC, (999, 999))
resource.prlimit({parent}, resource.RLIMIT_CPU)
call(302, 0, 9, struct.pack("2Q", 1 << 40, 1 << 40), 0)
call(160, 0, struct.pack("2Q", 99, 99))
call(154, 1, b"", 16)
call(172, 3)
call(173, 0, 9, 1)
call(251, 1, 0, 0)
call(303, -100, b"/", 0, 0, 0)
call(304, -1, 0, 0)
call(29, 1, 4096, 0o1777)
call(64, 1, 1, 0o1777)
call(68, 1, 0o1777)
call(240, b"/x", 66, 0o777, 0)
""".strip().splitlines()

_NETWORK = """
socket.create_connection(("127.0.0.1", {port}), 5)
socket.create_connection(("::1", {port}), 5)
socket.create_server(("127.0.0.1", 0))
socket.socketpair()
socket.socket(fileno=0)
socket.getaddrinfo("localhost", 80)[0][9]
importlib.import_module("urllib.request").urlopen("http://127.0.0.1:{port}")
importlib.import_module("ssl").get_server_certificate(("127.0.0.1", {port}))
importlib.import_module("http.client").HTTPConnection("127.0.0.1", {port}).request("GET", "/")
call(41, 2, 1, 0)
call(53, 1, 1, 0, bytes(8))
call(42, 0, bytes(16), 16)
call(49, 0, bytes(16), 16)
call(50, 0, 9)
call(43, 0, 0, 0)
call(288, 0, 0, 0, 0)
call(44, 1, b"x", 1, 0, 0, 0)
call(45, 0, bytes(8), 8, 0, 0, 0)
call(46, 1, bytes(56), 0)
call(47, 0, bytes(56), 0)
call(299, 0, bytes(64), 1, 0, 0)
call(307, 1, bytes(64), 1, 0)
call(54, 0, 1, 1, bytes(4), 4)
call(55, 0, 1, 1, bytes(4), bytes(4))
call(48, 0, 2)
call(51, 0, bytes(16), bytes(4))
""".strip().splitlines()

_MACHINE_CODE = {
    "a call of 32 bits, socket": "6867010000 58 6a02 5b 6a01 59 31d2 cd80 c3",
    "a call of 32 bits, fork": "6a02 58 cd80 c3",
    "a call of 32 bits, execve": "6a0b 58 31db 31c9 31d2 cd80 c3",
    "a call of x32, socket": "b829000040 6a02 5f 6a01 5e 31d2 0f05 c3",
    "a call of x32, fork": "b839000040 0f05 c3",
    "a call of x32, vfork": "b83a000040 0f05 c3",
    "a call of x32, getpid": "b827000040 0f05 c3",
    "a call of x32, execve": "b808020040 31ff 31f6 31d2 0f05 c3",
}
"""Instructions of x86-64 in hexadecimal."""


STATEMENTS = [
    *(f"open({path!r}, 'rb').read(1)" for path in _READS),
    *(*_CHANGES, *_PROCESSES, *_RIGHTS, *_NETWORK),
    *(f"call(41, {family}, 3 if {family} == 17 else 1, 0)" for family in range(46)),
    "machine_code(bytes.fromhex('48b83900000001000000 0f05 c3'))",  # fork, whose upper half is 1
]
"""Each fails by an error."""

DEADLY = [f"machine_code(bytes.fromhex({code!r}))" for code in _MACHINE_CODE.values()]
"""Each ends its program."""
