// Macros that headers of systems leave behind, as a program may have them when it includes this
// library: after the standard library, before this one. Each stands for something that no compiler
// takes. min, max, major, minor, makedev and index take arguments, and are what they are there. The
// functions that <curses.h> makes macros of (clear, move) are left out: it does not in C++.
#pragma once

#include <bits/stdc++.h>

#undef min
#undef max
#undef major
#undef minor
#undef makedev
#undef index
#define min(a, b) (((a) < (b)) ? (a) : (b))
#define max(a, b) (((a) > (b)) ? (a) : (b))
#define major(device) focus_macro(device)
#define minor(device) focus_macro(device)
#define makedev(a, b) focus_macro(a, b)
#define index(text, letter) focus_macro(text, letter)

// <windows.h> and what it includes
#undef near
#define near focus macro near;
#undef far
#define far focus macro far;
#undef small
#define small focus macro small;
#undef IN
#define IN focus macro IN;
#undef OUT
#define OUT focus macro OUT;
#undef OPTIONAL
#define OPTIONAL focus macro OPTIONAL;
#undef CONST
#define CONST focus macro CONST;
#undef VOID
#define VOID focus macro VOID;
#undef BYTE
#define BYTE focus macro BYTE;
#undef WORD
#define WORD focus macro WORD;
#undef BOOL
#define BOOL focus macro BOOL;
#undef TRUE
#define TRUE focus macro TRUE;
#undef FALSE
#define FALSE focus macro FALSE;
#undef DELETE
#define DELETE focus macro DELETE;
#undef ERROR
#define ERROR focus macro ERROR;
#undef NO_ERROR
#define NO_ERROR focus macro NO_ERROR;
#undef IGNORE
#define IGNORE focus macro IGNORE;
#undef ABSOLUTE
#define ABSOLUTE focus macro ABSOLUTE;
#undef RELATIVE
#define RELATIVE focus macro RELATIVE;
#undef OPAQUE
#define OPAQUE focus macro OPAQUE;
#undef TRANSPARENT
#define TRANSPARENT focus macro TRANSPARENT;
#undef RGB
#define RGB(x) focus_macro(x)
#undef interface
#define interface focus macro interface;
#undef STRICT
#define STRICT focus macro STRICT;
#undef THIS
#define THIS focus macro THIS;
#undef PURE
#define PURE focus macro PURE;
#undef INFINITE
#define INFINITE focus macro INFINITE;
#undef CALLBACK
#define CALLBACK focus macro CALLBACK;
#undef WINAPI
#define WINAPI focus macro WINAPI;
#undef APIENTRY
#define APIENTRY focus macro APIENTRY;
#undef FAR
#define FAR focus macro FAR;
#undef NEAR
#define NEAR focus macro NEAR;
#undef pascal
#define pascal focus macro pascal;
#undef cdecl
#define cdecl focus macro cdecl;
#undef hyper
#define hyper focus macro hyper;
#undef cmd1
#define cmd1 focus macro cmd1;
#undef cmd2
#define cmd2 focus macro cmd2;
#undef stc1
#define stc1 focus macro stc1;
#undef rad1
#define rad1 focus macro rad1;
#undef grp1
#define grp1 focus macro grp1;
#undef grp2
#define grp2 focus macro grp2;
#undef grp3
#define grp3 focus macro grp3;
#undef grp4
#define grp4 focus macro grp4;
#undef psh1
#define psh1 focus macro psh1;
#undef lst1
#define lst1 focus macro lst1;
#undef cmb1
#define cmb1 focus macro cmb1;
#undef edt1
#define edt1 focus macro edt1;
#undef scr1
#define scr1 focus macro scr1;
#undef ctl1
#define ctl1 focus macro ctl1;
#undef chx1
#define chx1 focus macro chx1;
#undef frm1
#define frm1 focus macro frm1;
#undef ico1
#define ico1 focus macro ico1;
#undef ALTERNATE
#define ALTERNATE focus macro ALTERNATE;
#undef WINDING
#define WINDING focus macro WINDING;
#undef PASSTHROUGH
#define PASSTHROUGH focus macro PASSTHROUGH;
#undef GetObject
#define GetObject focus macro GetObject;
#undef SendMessage
#define SendMessage focus macro SendMessage;
#undef CreateWindow
#define CreateWindow focus macro CreateWindow;

// <complex.h>, <math.h> of System V, Arduino's <Arduino.h>
#undef I
#define I focus macro I;
#undef complex
#define complex focus macro complex;
#undef imaginary
#define imaginary focus macro imaginary;
#undef DOMAIN
#define DOMAIN focus macro DOMAIN;
#undef SING
#define SING focus macro SING;
#undef OVERFLOW
#define OVERFLOW focus macro OVERFLOW;
#undef UNDERFLOW
#define UNDERFLOW focus macro UNDERFLOW;
#undef PLOSS
#define PLOSS focus macro PLOSS;
#undef TLOSS
#define TLOSS focus macro TLOSS;
#undef HUGE
#define HUGE focus macro HUGE;
#undef PI
#define PI focus macro PI;
#undef MAXFLOAT
#define MAXFLOAT focus macro MAXFLOAT;

// <termios.h>
#undef B0
#define B0 focus macro B0;
#undef B50
#define B50 focus macro B50;
#undef B75
#define B75 focus macro B75;
#undef B110
#define B110 focus macro B110;
#undef B300
#define B300 focus macro B300;
#undef B600
#define B600 focus macro B600;
#undef B1200
#define B1200 focus macro B1200;
#undef B2400
#define B2400 focus macro B2400;
#undef B9600
#define B9600 focus macro B9600;
#undef B19200
#define B19200 focus macro B19200;
#undef B38400
#define B38400 focus macro B38400;
#undef CR0
#define CR0 focus macro CR0;
#undef CR1
#define CR1 focus macro CR1;
#undef NL0
#define NL0 focus macro NL0;
#undef NL1
#define NL1 focus macro NL1;
#undef TAB0
#define TAB0 focus macro TAB0;
#undef TAB1
#define TAB1 focus macro TAB1;
#undef BS0
#define BS0 focus macro BS0;
#undef BS1
#define BS1 focus macro BS1;
#undef FF0
#define FF0 focus macro FF0;
#undef FF1
#define FF1 focus macro FF1;
#undef VT0
#define VT0 focus macro VT0;
#undef VT1
#define VT1 focus macro VT1;
#undef ECHO
#define ECHO focus macro ECHO;
#undef ECHOE
#define ECHOE focus macro ECHOE;
#undef ECHOK
#define ECHOK focus macro ECHOK;
#undef ISIG
#define ISIG focus macro ISIG;
#undef ICANON
#define ICANON focus macro ICANON;
#undef OPOST
#define OPOST focus macro OPOST;
#undef CS5
#define CS5 focus macro CS5;
#undef CS6
#define CS6 focus macro CS6;
#undef CS7
#define CS7 focus macro CS7;
#undef CS8
#define CS8 focus macro CS8;
#undef CSIZE
#define CSIZE focus macro CSIZE;
#undef CREAD
#define CREAD focus macro CREAD;
#undef PARENB
#define PARENB focus macro PARENB;
#undef TOSTOP
#define TOSTOP focus macro TOSTOP;
#undef CTRL
#define CTRL(x) focus_macro(x)
#undef VMIN
#define VMIN focus macro VMIN;
#undef VTIME
#define VTIME focus macro VTIME;
#undef VEOF
#define VEOF focus macro VEOF;
#undef VEOL
#define VEOL focus macro VEOL;

// <X11/X.h>, <X11/Xlib.h>
#undef None
#define None focus macro None;
#undef Always
#define Always focus macro Always;
#undef Above
#define Above focus macro Above;
#undef Below
#define Below focus macro Below;
#undef Success
#define Success focus macro Success;
#undef Status
#define Status focus macro Status;
#undef Bool
#define Bool focus macro Bool;
#undef True
#define True focus macro True;
#undef False
#define False focus macro False;
#undef Complex
#define Complex focus macro Complex;
#undef Convex
#define Convex focus macro Convex;
#undef Nonconvex
#define Nonconvex focus macro Nonconvex;
#undef CurrentTime
#define CurrentTime focus macro CurrentTime;
#undef Expose
#define Expose focus macro Expose;
#undef FocusIn
#define FocusIn focus macro FocusIn;
#undef FocusOut
#define FocusOut focus macro FocusOut;
#undef KeyPress
#define KeyPress focus macro KeyPress;
#undef KeyRelease
#define KeyRelease focus macro KeyRelease;
#undef Unsorted
#define Unsorted focus macro Unsorted;
#undef YSorted
#define YSorted focus macro YSorted;
#undef Opposite
#define Opposite focus macro Opposite;
#undef InputOnly
#define InputOnly focus macro InputOnly;
#undef InputOutput
#define InputOutput focus macro InputOutput;
#undef GrayScale
#define GrayScale focus macro GrayScale;
#undef TrueColor
#define TrueColor focus macro TrueColor;
#undef Button1
#define Button1 focus macro Button1;
#undef GXor
#define GXor focus macro GXor;
#undef GXand
#define GXand focus macro GXand;
#undef GXxor
#define GXxor focus macro GXxor;
#undef GXset
#define GXset focus macro GXset;
#undef GXclear
#define GXclear focus macro GXclear;
#undef GXcopy
#define GXcopy focus macro GXcopy;
#undef GXnoop
#define GXnoop focus macro GXnoop;
#undef SyncBoth
#define SyncBoth focus macro SyncBoth;
#undef DestroyAll
#define DestroyAll focus macro DestroyAll;
#undef AllTemporary
#define AllTemporary focus macro AllTemporary;
#undef NoSymbol
#define NoSymbol focus macro NoSymbol;
#undef TopIf
#define TopIf focus macro TopIf;
#undef BottomIf
#define BottomIf focus macro BottomIf;
#undef QLength
#define QLength focus macro QLength;

// newlib's <ctype.h>
#undef _U
#define _U focus macro _U;
#undef _L
#define _L focus macro _L;
#undef _N
#define _N focus macro _N;
#undef _S
#define _S focus macro _S;
#undef _P
#define _P focus macro _P;
#undef _C
#define _C focus macro _C;
#undef _X
#define _X focus macro _X;
#undef _B
#define _B focus macro _B;

// predefined by GNU dialects, <sys/param.h>, <sys/types.h>
#undef unix
#define unix focus macro unix;
#undef linux
#define linux focus macro linux;
#undef NBBY
#define NBBY focus macro NBBY;
#undef MAXBSIZE
#define MAXBSIZE focus macro MAXBSIZE;
#undef DEV_BSIZE
#define DEV_BSIZE focus macro DEV_BSIZE;
#undef NODEV
#define NODEV focus macro NODEV;
#undef NCARGS
#define NCARGS focus macro NCARGS;
#undef roundup
#define roundup(x, y) focus_macro(x, y)
#undef howmany
#define howmany(x, y) focus_macro(x, y)

// <curses.h>, <fcntl.h>, and logging headers
#undef DEBUG
#define DEBUG focus macro DEBUG;
#undef INFO
#define INFO focus macro INFO;
#undef WARNING
#define WARNING focus macro WARNING;
#undef FATAL
#define FATAL focus macro FATAL;
#undef ERR
#define ERR focus macro ERR;
#undef KEY_MIN
#define KEY_MIN focus macro KEY_MIN;
#undef KEY_MAX
#define KEY_MAX focus macro KEY_MAX;
#undef A_NORMAL
#define A_NORMAL focus macro A_NORMAL;
#undef COLOR_RED
#define COLOR_RED focus macro COLOR_RED;
#undef BUTTON1_PRESSED
#define BUTTON1_PRESSED focus macro BUTTON1_PRESSED;
#undef NCURSES_BOOL
#define NCURSES_BOOL focus macro NCURSES_BOOL;
#undef LINES
#define LINES focus macro LINES;
#undef COLS
#define COLS focus macro COLS;
#undef FAPPEND
#define FAPPEND focus macro FAPPEND;
#undef FASYNC
#define FASYNC focus macro FASYNC;
#undef FNONBLOCK
#define FNONBLOCK focus macro FNONBLOCK;
#undef SOCK_RAW
#define SOCK_RAW focus macro SOCK_RAW;
#undef IN_CLASSA
#define IN_CLASSA focus macro IN_CLASSA;
// Qt's keywords.
#undef slots
#define slots focus macro slots;
#undef signals
#define signals focus macro signals;
#undef emit
#define emit focus macro emit;
#undef foreach
#define foreach focus macro foreach;
#undef forever
#define forever focus macro forever;
