"""screen.py COLUMNS FRAMES COMMAND...: what a terminal shows.

Runs COMMAND in a pseudo-terminal of so many columns. Prints the lines that it leaves on the screen,
which is as high as needed, and exits with COMMAND's code. The file FRAMES gets a line for each
carriage return: what stood in the cursor's line then.

With INTERRUPT=N in the environment, Ctrl-C is typed after N frames.
"""
import fcntl
import os
import struct
import sys
import termios

CLEAR = "\033[K"  # from the cursor to the end of the line


class Screen:
    """Lines of so many columns; a character after the last column begins a new line."""

    def __init__(self, columns, frames):
        self.columns, self.frames = columns, frames
        self.lines, self.column, self.returns = [[]], 0, 0

    def put(self, character):
        if character == "\n":
            self.lines.append([])
        elif character == "\r":
            self.column = 0
            self.returns += 1
            self.frames.write("".join(self.lines[-1]) + "\n")
        else:
            if self.column == self.columns:
                self.lines.append([])
                self.column = 0
            line = self.lines[-1]
            line.extend(" " * (self.column + 1 - len(line)))
            line[self.column] = character
            self.column += 1

    def write(self, text):
        """Returns what cannot be shown yet: the start of an escape sequence."""
        while text:
            if text.startswith(CLEAR):
                del self.lines[-1][self.column :]
                text = text[len(CLEAR) :]
            elif CLEAR.startswith(text):
                return text
            else:
                self.put(text[0])
                text = text[1:]
        return ""


def start(command, columns):
    """Returns the process and the other end of its terminal."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = os.fork()
    if child == 0:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for stream in range(3):
            os.dup2(slave, stream)
        os.execvp(command[0], command)
    os.close(slave)
    return child, master


def main():
    screen = Screen(int(sys.argv[1]), open(sys.argv[2], "w"))
    child, terminal = start(sys.argv[3:], screen.columns)
    interrupt = int(os.environ.get("INTERRUPT", 0))
    rest = ""
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # nobody has the other end open
            break
        rest = screen.write(rest + data.decode("latin-1"))
        if 0 < interrupt <= screen.returns:
            os.write(terminal, b"\x03")
            interrupt = 0
    for line in screen.lines if screen.lines[-1] else screen.lines[:-1]:
        print("".join(line))
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


main()
