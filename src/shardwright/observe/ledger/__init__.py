"""What steps were lost to: each millisecond booked to a cause, and to the rank that others waited for."""
