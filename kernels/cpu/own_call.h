/* Calls of a user's kernel. If a signal ends the process during one, a line on standard error names the kernel first.
   Included once by a Program that has such calls: loading its library installs the handlers. */

#include <signal.h>
#include <unistd.h>

static const struct {
    int number;
    const char *cause;
} OWN_SIGNALS[] = {
    {SIGSEGV, "SIGSEGV; does it read or write outside its arrays, or have large arrays on the stack?\n"},
    {SIGBUS, "SIGBUS; does it read or write outside its arrays?\n"},
    {SIGFPE, "SIGFPE; does it divide an integer by 0?\n"},
    {SIGILL, "SIGILL; does it have instructions that this processor lacks, or a function that ends without return?\n"},
    {SIGABRT, "SIGABRT; it, or a function that it calls, has called abort\n"},
};
enum { OWN_SIGNAL_COUNT = sizeof OWN_SIGNALS / sizeof *OWN_SIGNALS };

static struct sigaction own_before[OWN_SIGNAL_COUNT]; /* the handlers of others */
static int64_t own_calls;                             /* calls that now run, in all threads */
static __thread const char *volatile own_message;     /* of the call that this thread runs; NULL if none */
static __thread char own_stack[1 << 16];              /* for the handler: the kernel may have filled the thread's */
static __thread int own_has_stack;

static void own_write(const char *text) {
    if (write(STDERR_FILENO, text, strlen(text)) < 0) return; /* standard error is closed */
}

/* Writes the line, once for all threads, and hands the signal to the handler before this one: an instruction that
   failed is executed again, so that handler gets its address. A signal of raise or abort is raised again. */
static void own_handler(int number, siginfo_t *info, void *context) {
    (void)context;
    static int told;
    int i = 0;
    while (OWN_SIGNALS[i].number != number) i++;
    /* The first access of a thread to own_message may allocate memory, so it is read only while there are calls. */
    if (__atomic_load_n(&own_calls, __ATOMIC_SEQ_CST) && own_message) {
        while (__atomic_exchange_n(&told, 1, __ATOMIC_SEQ_CST)) pause(); /* the first thread ends the process */
        if (isatty(STDERR_FILENO)) own_write("\n");                      /* after a progress bar */
        own_write(own_message);
        own_write(OWN_SIGNALS[i].cause);
    }
    sigaction(number, &own_before[i], NULL);
    if (info->si_code <= 0) raise(number);
}

static __attribute__((constructor)) void own_install(void) {
    struct sigaction action = {.sa_sigaction = own_handler, .sa_flags = SA_ONSTACK | SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < OWN_SIGNAL_COUNT; i++) sigaction(OWN_SIGNALS[i].number, &action, &own_before[i]);
}

static void own_begin(const char *message) {
    if (!own_has_stack) {
        stack_t stack = {.ss_sp = own_stack, .ss_size = sizeof own_stack}, before;
        sigaltstack(NULL, &before);
        if (before.ss_flags & SS_DISABLE) sigaltstack(&stack, NULL); /* else there is one of another library */
        own_has_stack = 1;
    }
    __atomic_fetch_add(&own_calls, 1, __ATOMIC_SEQ_CST);
    own_message = message;
}

static void own_end(void) {
    own_message = NULL;
    __atomic_fetch_sub(&own_calls, 1, __ATOMIC_SEQ_CST);
}
