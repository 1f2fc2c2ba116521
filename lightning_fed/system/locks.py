"""Locks on open files, which end with the processes that hold them."""

import fcntl


def taken(descriptor: int, shared: bool = False) -> bool:
    """Take the lock of an open file, exclusively or shared. Returns False if another process has it. A file system without locks
    raises another :class:`OSError`.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_NB | (fcntl.LOCK_SH if shared else fcntl.LOCK_EX))
    except BlockingIOError:
        return False
    return True
