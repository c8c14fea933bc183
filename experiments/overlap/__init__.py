"""Do asynchronous trainers overlap their waits?"""
