"""What the agent of the pictures is asked to do in a terminal, and how it goes about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """A call of the terminal: what is thought before it, the command, what it prints."""

    thought: str
    command: str
    output: str


@dataclass(frozen=True)
class Task:
    """A task, the way that solves it, and the step that leads to a wrong answer.

    Attributes:
        name: of the task.
        question: what the user asks.
        steps: those that solve it.
        answer: the right one.
        slip: taken in place of the last step.
        wrong: the answer after it.
        hard: how hard it is; 0 is solved half of the time by the first policy.
    """

    name: str
    question: str
    steps: tuple[Step, ...]
    answer: str
    slip: Step
    wrong: str
    hard: float


DETOURS = (
    Step("Let me see where I am.", "pwd", "/srv/warehouse"),
    Step("First, which files are there?", "ls", "README.md  config  data  logs  src  tests"),
    Step(
        "Is there a note about it?", "cat README.md | head -3", "# Warehouse\n\nNightly jobs write to logs/ and data/."
    ),
    Step("Try jq.", "jq --version", "sh: jq: command not found"),
)

TASKS = (
    Task(
        "count-failed-requests",
        "How many requests in logs/access.log failed with status 500 on 3 May?",
        (
            Step(
                "I look at the format of a line first.",
                "head -2 logs/access.log",
                '10.0.3.7 - [03/May 09:14:02] "GET /cart" 200 512\n10.0.3.9 - [03/May 09:14:02] "POST /pay" 500 87',
            ),
            Step(
                "The status is the last field but one, and the date has to match.",
                "grep '03/May' logs/access.log | awk '$(NF-1) == 500' | wc -l",
                "41",
            ),
        ),
        "41 requests failed with status 500 on 3 May.",
        Step("I count the lines with 500.", "grep -c 500 logs/access.log", "187"),
        "187 requests failed with status 500 on 3 May.",
        -0.6,
    ),
    Task(
        "fix-off-by-one",
        "tests/test_pages.py fails. Repair src/pages.py and say what was wrong.",
        (
            Step(
                "What does the test say?",
                "pytest -q tests/test_pages.py | tail -2",
                "E  assert pages(10, 5) == 2\n1 failed, 3 passed",
            ),
            Step("Now the function.", "cat src/pages.py", "def pages(items, size):\n    return items // size + 1"),
            Step(
                "It adds a page where nothing is left over; rounding up is what is meant.",
                "sed -i 's|items // size + 1|-(-items // size)|' src/pages.py && pytest -q | tail -1",
                "4 passed",
            ),
        ),
        "pages() counted one page too many whenever the last one was full; it rounds up now, and all tests pass.",
        Step(
            "One too many, so I take the one away.",
            "sed -i 's| + 1||' src/pages.py && pytest -q | tail -1",
            "1 failed, 3 passed",
        ),
        "pages() added 1 without need; I removed it.",
        0.9,
    ),
    Task(
        "largest-folder",
        "Which folder below data/ takes the most space?",
        (
            Step(
                "",
                "du -s data/* | sort -n | tail -2",
                "81920\tdata/orders\n524288\tdata/pictures",
            ),
        ),
        "data/pictures, with 512 MiB.",
        Step("", "ls -l data | sort -k5 -n | tail -1", "drwxr-xr-x 9 agent agent 4096 orders"),
        "data/orders is the largest.",
        -1.6,
    ),
    Task(
        "port-in-use",
        "The server does not start: port 8080 is in use. Free it without touching anything else.",
        (
            Step(
                "Who listens there?",
                "ss -ltnp 'sport = :8080'",
                'LISTEN 0 128 *:8080 users:(("python3",pid=2114,fd=3))',
            ),
            Step("Is that a leftover of ours?", "ps -o args= 2114", "python3 -m http.server 8080"),
            Step("Only this one.", "kill 2114 && ss -ltn 'sport = :8080' | wc -l", "1"),
        ),
        "A forgotten http.server (2114) held the port. I ended it, and nothing listens on 8080 now.",
        Step("I end the Python processes.", "killall python3", ""),
        "All Python processes are ended, the port is free.",
        0.3,
    ),
    Task(
        "median-price",
        "What is the median price in data/orders/may.csv?",
        (
            Step("Which column?", "head -2 data/orders/may.csv", "order,item,price\n1,lamp,39.90"),
            Step(
                "Sort the prices, and take the one in the middle.",
                "tail -n +2 data/orders/may.csv | cut -d, -f3 | sort -n | awk '{a[NR]=$1} END {print a[(NR+1)/2]}'",
                "24.50",
            ),
        ),
        "The median price is 24.50.",
        Step(
            "",
            "awk -F, '{s+=$3} END {print s/NR}' data/orders/may.csv",
            "31.72",
        ),
        "The median price is 31.72.",
        0.0,
    ),
    Task(
        "rename-photos",
        "Give the files in data/pictures/new the date of their day as a prefix, 2025-05-03-NAME.",
        (
            Step("", "ls data/pictures/new", "cat.jpg  desk.jpg  'two words.jpg'"),
            Step(
                "One name has a space, so names go in quotes.",
                'cd data/pictures/new && for f in *; do mv "$f" "$(date -r "$f" +%F)-$f"; done; ls',
                "2025-05-03-cat.jpg  2025-05-03-desk.jpg  '2025-05-03-two words.jpg'",
            ),
        ),
        "All three files have their date in front.",
        Step(
            "",
            "cd data/pictures/new && for f in $(ls); do mv $f $(date -r $f +%F)-$f; done",
            "date: two: No such file or directory\nmv: cannot stat 'two'",
        ),
        "The files have their date in front.",
        0.7,
    ),
    Task(
        "undo-commit",
        "My last commit has a password in config/db.yml. It is not pushed. Take it out and keep my other changes.",
        (
            Step("", "git show --stat HEAD | tail -3", " config/db.yml | 2 +-\n src/db.py     | 9 +++++++++"),
            Step(
                "Soft, so that the work stays; then only the file goes back.",
                "git reset --soft HEAD~1 && git restore -SW config/db.yml && git commit -qm Pool && git show --stat",
                " 1 file changed, 9 insertions(+)",
            ),
        ),
        "The commit has src/db.py only. The password was never pushed; change it all the same.",
        Step("", "git reset --hard HEAD~1", "HEAD is now at 5f0c1d2 Retry"),
        "The commit is gone, and the password with it.",
        1.3,
    ),
    Task(
        "slowest-query",
        "Which statement in logs/sql.log takes the most time altogether?",
        (
            Step("", "head -2 logs/sql.log", "12ms SELECT cart\n840ms SELECT report"),
            Step(
                "A frequent one may take more than the slowest.",
                "sed 's/ms//' logs/sql.log | awk '{s[$2$3] += $1} END {for (q in s) print s[q], q}' | sort -n",
                "96214 SELECTcart",
            ),
        ),
        "SELECT cart: 96 s altogether, though each takes 12 ms.",
        Step("", "sort -n logs/sql.log | tail -1", "840ms SELECT report"),
        "SELECT report, with 840 ms.",
        1.0,
    ),
)
