"""The system calls that a worker's filter speaks of, and their numbers.

What a worker needs was measured: strace from the moment it is confined, over the end-to-end tests of every protocol. The
set is what was seen, and beside each call its siblings, which another C library or processor takes for the same.

Source: the kernel's tables, asm/unistd_64.h for x86_64 and asm-generic/unistd.h for aarch64.
"""

from __future__ import annotations

from typing import Final

FREE: Final = (
    "read", "write", "readv", "writev", "pread64", "pwrite64", "lseek", "ftruncate", "close", "dup", "fstat",
    "newfstatat", "stat", "lstat", "statx", "accept", "accept4", "bind", "connect", "getpeername",
    "getsockname", "getsockopt", "recvfrom", "recvmsg", "sendto", "sendmsg", "shutdown", "epoll_create1",
    "epoll_ctl", "epoll_wait", "epoll_pwait", "poll", "ppoll", "select", "pselect6", "pipe2", "splice", "eventfd2", "brk",
    "munmap", "mremap", "madvise", "futex", "membarrier", "rseq", "set_robust_list", "sched_yield",
    "sched_getaffinity", "clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday",
    "time", "times", "getrusage", "getrandom", "getpid", "getppid", "gettid", "getuid", "geteuid", "getgid",
    "getegid", "uname", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "tgkill",
    "restart_syscall", "exit", "exit_group",
)  # fmt: skip
"""What any arguments are let through with: they reach nothing but what the worker already holds."""

JUDGED: Final = (
    "socket", "socketpair", "setsockopt", "ioctl", "fcntl", "open", "openat", "mmap", "mprotect", "clone",
    "prctl", "prlimit64",
)  # fmt: skip
"""What is let through with the right arguments; `gate.seccomp` says which those are."""

FATAL: Final = (
    "execve", "execveat", "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp",
    "pidfd_getfd", "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen", "fsconfig",
    "fsmount", "fspick", "mount_setattr", "unshare", "setns", "bpf", "perf_event_open", "userfaultfd", "keyctl",
    "add_key", "request_key", "io_uring_setup", "io_uring_enter", "io_uring_register", "init_module",
    "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff",
    "open_by_handle_at", "name_to_handle_at", "fanotify_init", "seccomp", "capset", "setuid", "setgid",
    "setreuid", "setregid", "setresuid", "setresgid", "setgroups", "setfsuid", "setfsgid", "personality",
    "modify_ldt", "iopl", "ioperm", "quotactl", "acct", "mknod", "mknodat", "settimeofday", "clock_settime",
    "adjtimex", "clock_adjtime", "sethostname", "setdomainname", "syslog",
)  # fmt: skip
"""What nothing in a worker ever calls, and what takes one over begins with: the worker is ended for it."""

X86_64: Final = {
    "read": 0, "write": 1, "readv": 19, "writev": 20, "pread64": 17, "pwrite64": 18, "lseek": 8,
    "ftruncate": 77, "close": 3, "dup": 32, "fstat": 5, "newfstatat": 262, "stat": 4, "lstat": 6, "statx": 332,
    "accept": 43, "accept4": 288, "bind": 49, "connect": 42, "getpeername": 52, "getsockname": 51,
    "getsockopt": 55, "recvfrom": 45, "recvmsg": 47, "sendto": 44, "sendmsg": 46, "shutdown": 48,
    "epoll_create1": 291, "epoll_ctl": 233, "epoll_wait": 232, "epoll_pwait": 281, "poll": 7, "ppoll": 271,
    "select": 23, "pselect6": 270, "pipe2": 293, "splice": 275, "eventfd2": 290, "brk": 12, "munmap": 11, "mremap": 25,
    "madvise": 28, "futex": 202, "membarrier": 324, "rseq": 334, "set_robust_list": 273, "sched_yield": 24,
    "sched_getaffinity": 204, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "nanosleep": 35, "gettimeofday": 96, "time": 201, "times": 100, "getrusage": 98, "getrandom": 318,
    "getpid": 39, "getppid": 110, "gettid": 186, "getuid": 102, "geteuid": 107, "getgid": 104, "getegid": 108,
    "uname": 63, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sigaltstack": 131,
    "tgkill": 234, "restart_syscall": 219, "exit": 60, "exit_group": 231, "socket": 41, "socketpair": 53,
    "setsockopt": 54, "ioctl": 16, "fcntl": 72, "open": 2, "openat": 257, "mmap": 9, "mprotect": 10,
    "clone": 56, "prctl": 157, "prlimit64": 302, "execve": 59, "execveat": 322, "ptrace": 101,
    "process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440, "kcmp": 312, "pidfd_getfd": 438,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "move_mount": 429, "open_tree": 428,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "unshare": 272,
    "setns": 308, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248,
    "request_key": 249, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
    "reboot": 169, "swapon": 167, "swapoff": 168, "open_by_handle_at": 304, "name_to_handle_at": 303,
    "fanotify_init": 300, "seccomp": 317, "capset": 126, "setuid": 105, "setgid": 106, "setreuid": 113,
    "setregid": 114, "setresuid": 117, "setresgid": 119, "setgroups": 116, "setfsuid": 122, "setfsgid": 123,
    "personality": 135, "modify_ldt": 154, "iopl": 172, "ioperm": 173, "quotactl": 179, "acct": 163,
    "mknod": 133, "mknodat": 259, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159,
    "clock_adjtime": 305, "sethostname": 170, "setdomainname": 171, "syslog": 103,
}  # fmt: skip

AARCH64: Final = {
    "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67, "pwrite64": 68, "lseek": 62,
    "ftruncate": 46, "close": 57, "dup": 23, "fstat": 80, "newfstatat": 79, "statx": 291, "accept": 202,
    "accept4": 242, "bind": 200, "connect": 203, "getpeername": 205, "getsockname": 204, "getsockopt": 209,
    "recvfrom": 207, "recvmsg": 212, "sendto": 206, "sendmsg": 211, "shutdown": 210, "epoll_create1": 20,
    "epoll_ctl": 21, "epoll_pwait": 22, "ppoll": 73, "pselect6": 72, "pipe2": 59, "splice": 76, "eventfd2": 19, "brk": 214,
    "munmap": 215, "mremap": 216, "madvise": 233, "futex": 98, "membarrier": 283, "rseq": 293,
    "set_robust_list": 99, "sched_yield": 124, "sched_getaffinity": 123, "clock_gettime": 113,
    "clock_getres": 114, "clock_nanosleep": 115, "nanosleep": 101, "gettimeofday": 169, "times": 153,
    "getrusage": 165, "getrandom": 278, "getpid": 172, "getppid": 173, "gettid": 178, "getuid": 174,
    "geteuid": 175, "getgid": 176, "getegid": 177, "uname": 160, "rt_sigaction": 134, "rt_sigprocmask": 135,
    "rt_sigreturn": 139, "sigaltstack": 132, "tgkill": 131, "restart_syscall": 128, "exit": 93,
    "exit_group": 94, "socket": 198, "socketpair": 199, "setsockopt": 208, "ioctl": 29, "fcntl": 25,
    "openat": 56, "mmap": 222, "mprotect": 226, "clone": 220, "prctl": 167, "prlimit64": 261, "execve": 221,
    "execveat": 281, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "process_madvise": 440,
    "kcmp": 272, "pidfd_getfd": 438, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
    "move_mount": 429, "open_tree": 428, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "mount_setattr": 442, "unshare": 97, "setns": 268, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
    "keyctl": 219, "add_key": 217, "request_key": 218, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "init_module": 105, "finit_module": 273, "delete_module": 106, "kexec_load": 104,
    "kexec_file_load": 294, "reboot": 142, "swapon": 224, "swapoff": 225, "open_by_handle_at": 265,
    "name_to_handle_at": 264, "fanotify_init": 262, "seccomp": 277, "capset": 91, "setuid": 146, "setgid": 144,
    "setreuid": 145, "setregid": 143, "setresuid": 147, "setresgid": 149, "setgroups": 159, "setfsuid": 151,
    "setfsgid": 152, "personality": 92, "quotactl": 60, "acct": 89, "mknodat": 33, "settimeofday": 170,
    "clock_settime": 112, "adjtimex": 171, "clock_adjtime": 266, "sethostname": 161, "setdomainname": 162,
    "syslog": 116,
}  # fmt: skip

SHARED_FROM: Final = 424
"""From here on both tables have the same numbers. Libraries try these calls first and fall back where the kernel says
that it has them not (ENOSYS); by EPERM they fail."""
